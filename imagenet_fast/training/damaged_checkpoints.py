"""Detects damaged checkpoints and sets them aside, so that a run resumes from an older one."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import read_objects, write_file
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.training.model_dir import CHECKPOINTS, checkpoint_steps, noted_step

DAMAGED_FILE = "damaged_checkpoints.jsonl"
_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})")
# Messages of TensorFlow's readers about corrupt checkpoints (tensor_bundle.cc, whose BundleReader
# checks CRCs, and table.cc, of the index). Other errors, as of permissions, disks or buckets, say
# nothing about the checkpoint.
_SIGNS = re.compile(
    r"checksum (?:does not match|mismatch)|sstable|bad (?:block|entry)|truncated block"
    r"|file is corrupt|corrupted|DATA_LOSS|data loss|read less bytes than requested|OUT_OF_RANGE",
    re.IGNORECASE,
)


class _Damaged(NamedTuple):
    step: int
    reason: str


def damage_of(checkpoint: str) -> str | None:
    """Reads a whole checkpoint and returns what is damaged; None: no damage was detected.

    Args:
      checkpoint: its path without an ending.
    """
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
    found = filter(None, map(_SHARD.fullmatch, files))
    shards = {int(match[1]): int(match[2]) for match in found}
    missing = set(range(max(shards.values(), default=1))) - set(shards)
    if missing:
        return f"part {min(missing)} of its data is missing"
    try:
        reader = tf.train.load_checkpoint(checkpoint)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (IndexError, tf.errors.OpError) as error:
        told = str(error).strip().splitlines()
        if isinstance(error, (IndexError, tf.errors.DataLossError)) or _SIGNS.search(str(error)):
            return told[0][:200] if told else type(error).__name__
    return None


def whole_checkpoint(model_dir: str, on_damaged: str) -> str | None:
    """Returns the newest undamaged checkpoint, and sets aside those that are newer.

    For the process that writes checkpoints, while no other does. Set aside means renamed: the files
    ``ckpt-5.*`` become ``damaged-ckpt-5.*``. This is reported, and recorded in ``DAMAGED_FILE``.

    Args:
      model_dir: of the run.
      on_damaged: ``previous``; or ``stop``: raise, and set none aside.

    Returns:
      The path without an ending; None: there is no checkpoint.

    Raises:
      UserError: if the newest is damaged and ``on_damaged`` is ``stop``, or if all are.
    """
    folder = to_path(model_dir, CHECKPOINTS)
    steps = checkpoint_steps(folder)
    if not steps:
        return None
    newest = str(folder / f"ckpt-{steps[-1]}")
    damaged: list[_Damaged] = []
    for step in reversed(steps):
        reason = damage_of(str(folder / f"ckpt-{step}"))
        if reason is None:
            break
        damaged.append(_Damaged(step, reason))
        if on_damaged == "stop":
            raise UserError(
                f"checkpoint {newest} is damaged ({reason}); --on_damaged_checkpoint=previous sets "
                "it aside and resumes from the one before it"
            )
    else:
        raise UserError(
            f"checkpoint {newest} is damaged ({damaged[0].reason}), and "
            + (f"so are the {len(damaged) - 1} before it" if damaged[1:] else "it is the only one")
            + "; begin anew: choose another --model_dir"
        )
    if damaged:
        names = [_set_aside(folder, own.step) for own in damaged]
        _tell(model_dir, damaged, names, step)
    if damaged or noted_step(folder) is None:
        _note(folder, [own for own in steps if own <= step])
    return str(folder / f"ckpt-{step}")


def damaged_checkpoints(model_dir: str) -> list[dict[str, Any]]:
    """Returns what was set aside: ``step``, ``reason`` and ``resumed_from``, a step, of each."""
    types = {"step": int, "reason": str, "resumed_from": int}
    return read_objects(to_path(model_dir, DAMAGED_FILE), types)


def _set_aside(folder: Path, step: int) -> str:
    """Renames a checkpoint and returns its new name."""
    files = [file for file in folder.iterdir() if file.name.startswith(f"ckpt-{step}.")]
    taken = {file.name.partition(".")[0] for file in folder.iterdir()}
    aside, number = f"damaged-ckpt-{step}", 1
    while aside in taken:
        number += 1
        aside = f"damaged-ckpt-{step}-{number}"
    # The index first: without it there is no such checkpoint any more.
    for file in sorted(files, key=lambda file: not file.name.endswith(".index")):
        file.replace(folder / f"{aside}.{file.name.partition('.')[2]}")
    return aside


def _tell(model_dir: str, damaged: list[_Damaged], names: list[str], step: int) -> None:
    lines = list(map(json.dumps, damaged_checkpoints(model_dir)))
    for own, name in zip(damaged, names):
        print(
            f"WARNING: checkpoint ckpt-{own.step} in {model_dir} is damaged ({own.reason}): set "
            f"aside as {name}; the run resumes from step {step}",
            file=sys.stderr,
            flush=True,
        )
        lines.append(json.dumps({**own._asdict(), "resumed_from": step}))
    write_file(to_path(model_dir, DAMAGED_FILE), "".join(f"{line}\n" for line in lines))


def _note(folder: Path, steps: Sequence[int]) -> None:
    """Notes which checkpoints there are, which is what ``tf.train.CheckpointManager`` removes."""
    names = [f"ckpt-{step}" for step in steps]
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    lines += [f"all_model_checkpoint_timestamps: {time.time()}" for _ in names]
    write_file(folder / "checkpoint", "".join(f"{line}\n" for line in lines))
