"""Detects damaged checkpoints and sets them aside, so that a run resumes from an older one."""

from __future__ import annotations

import json
import re
from typing import Any

import tensorflow as tf

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.files import read_objects, write_file
from imagenet_fast.base.notices import say
from imagenet_fast.base.outside import Count
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.training.checkpoints.model_dir import CHECKPOINTS, checkpoint_steps, record_steps
from imagenet_fast.training.checkpoints.sizes import claimed_too_large

DAMAGED_FILE = "damaged_checkpoints.jsonl"
_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})")
# TensorFlow's messages about corrupt checkpoints (tensor_bundle.cc, whose BundleReader checks CRCs,
# and table.cc, for the index). Other errors, as of permissions, disks or buckets, say nothing about
# the checkpoint.
_SIGNS = re.compile(
    r"checksum (?:does not match|mismatch)|sstable|bad (?:block|entry)|truncated block"
    r"|file is corrupt|corrupted|DATA_LOSS|data loss|read less bytes than requested|OUT_OF_RANGE",
    re.IGNORECASE,
)


def damage_of(checkpoint: str) -> str | None:
    """Reads a checkpoint, named without a suffix; returns what is damaged, None: nothing."""
    path = to_path(checkpoint)
    files = {
        file.name[len(path.name) :]: file
        for file in path.parent.iterdir()
        if file.name.startswith(f"{path.name}.")
    }
    if ".index" not in files:
        return "its index is missing"
    for file in files.values():
        if is_local(file) and file.is_dir():
            return f"{file.name} is a directory"
    matches = filter(None, map(_SHARD.fullmatch, files))
    shards = {int(match[1]): int(match[2]) for match in matches}
    missing = set(range(max(shards.values(), default=1))) - set(shards)
    if missing:
        return f"part {min(missing)} of its data is missing"
    claimed = claimed_too_large(checkpoint)
    if claimed:
        return claimed
    try:
        reader = tf.train.load_checkpoint(checkpoint)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (IndexError, tf.errors.OpError) as error:
        if isinstance(error, (IndexError, tf.errors.DataLossError)) or _SIGNS.search(str(error)):
            return first_line(error)[:200]
    return None


def whole_checkpoint(model_dir: str) -> str | None:
    """Returns the newest undamaged checkpoint, and sets aside those that are newer.

    For the only process that writes checkpoints. Set aside means renamed: the files ``ckpt-5.*``
    become ``damaged-ckpt-5.*``. A warning is printed, and a row added to ``DAMAGED_FILE``.

    Returns:
      The path without a suffix; None: there is no checkpoint.

    Raises:
      UserError: if all are damaged; none is set aside then.
    """
    folder = to_path(model_dir, CHECKPOINTS)
    steps = checkpoint_steps(folder)
    if not steps:
        return None
    newest = str(folder / f"ckpt-{steps[-1]}")
    damaged: dict[int, str] = {}  # the reasons, by step
    for step in reversed(steps):
        reason = damage_of(str(folder / f"ckpt-{step}"))
        if reason is None:
            break
        damaged[step] = reason
    else:
        raise UserError(
            f"checkpoint {newest} is damaged ({damaged[steps[-1]]}), and "
            + (f"so are the {len(steps) - 1} before it" if steps[1:] else "it is the only one")
            + "; start a new run: choose another --model_dir"
        )
    if damaged:
        names = [_set_aside(folder, number) for number in damaged]
        _report(model_dir, damaged, names, step)
    record_steps(folder, [earlier for earlier in steps if earlier <= step])
    return str(folder / f"ckpt-{step}")


def damaged_checkpoints(model_dir: str) -> list[dict[str, Any]]:
    """Returns ``step``, ``reason`` and ``resumed_from`` (a step) of each one set aside."""
    types = {"step": Count, "reason": str, "resumed_from": Count}
    return read_objects(to_path(model_dir, DAMAGED_FILE), types)


def _set_aside(folder: Path, step: int) -> str:
    """Renames a checkpoint and returns its new name."""
    files = [file for file in folder.iterdir() if file.name.startswith(f"ckpt-{step}.")]
    existing = {file.name.partition(".")[0] for file in folder.iterdir()}
    aside, number = f"damaged-ckpt-{step}", 1
    while aside in existing:
        number += 1
        aside = f"damaged-ckpt-{step}-{number}"
    # The index first: without it, the checkpoint no longer exists.
    for file in sorted(files, key=lambda file: not file.name.endswith(".index")):
        file.replace(folder / f"{aside}.{file.name.partition('.')[2]}")
    return aside


def _report(model_dir: str, damaged: dict[int, str], names: list[str], resumed: int) -> None:
    lines = list(map(json.dumps, damaged_checkpoints(model_dir)))
    for (step, reason), name in zip(damaged.items(), names):
        say(
            f"WARNING: checkpoint ckpt-{step} in {model_dir} is damaged ({reason}): set aside as "
            f"{name}; the run resumes from step {resumed}"
        )
        lines.append(json.dumps({"step": step, "reason": reason, "resumed_from": resumed}))
    write_file(to_path(model_dir, DAMAGED_FILE), "".join(f"{line}\n" for line in lines))
