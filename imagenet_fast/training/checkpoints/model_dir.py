"""A run's ``model_dir``: claiming it, and reading its files."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.files import write_file
from imagenet_fast.base.former_names import with_todays_options
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.outside import MAX_JSON, read_bounded, read_json
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.config import Config
from imagenet_fast.data.class_values import CLASS_VALUES_FILE, recorded_class_values
from imagenet_fast.data.info import numbered_labels
from imagenet_fast.data.manifest import FILE as MANIFEST
from imagenet_fast.data.manifest import read_manifest
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.distribute.cluster import TAKING_PART
from imagenet_fast.models.options import CUSTOM, is_custom
from imagenet_fast.optimizers.options import ScheduleOptions
from imagenet_fast.training.checkpoints.config_file import (
    CONFIG_FILE,
    differences,
    directory_of,
    other_options,
    stored_config,
)
from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.logger import Row
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.options import CHECKPOINT_CHOICES, metric_of, metric_text

LABELS_FILE = "labels.txt"
PREPARATION_FILE = "preparation.json"
CHECKPOINTS = "checkpoints"  # a folder
BEST = "best"  # a folder with one checkpoint, by keep_best
_SHARED_OPTIONS = {field.name for field in dataclasses.fields(SharedOptions)}
# They may change if the run's steps so far would be the same; see schedule_change.
SCHEDULE_OPTIONS = {f.name for f in dataclasses.fields(ScheduleOptions)} - _SHARED_OPTIONS
_CHECKPOINT_FILE = re.compile(r"ckpt-(\d{1,15})\.(index|data-\d{5}-of-\d{5})")
# TensorFlow's list of checkpoints, and the line with the latest.
_RECORD = "checkpoint"
_LATEST = re.compile(rb'^model_checkpoint_path: "(?:.*/)?ckpt-(\d{1,15})"$', re.MULTILINE)
_MAX_RECORD = 2**20
# For which a training that a supervisor has started waits for the lock.
_LOCK_SECONDS = 180.0


def claim_model_dir(
    config: Config,
    labels: Sequence[str],
    preparation: Preparation | None = None,
    class_values: Mapping[str, Sequence[float]] | None = None,
    *,
    chief: bool = True,
) -> None:
    """Writes the configuration to ``model_dir``, or checks that it is there.

    Args:
      config: gives ``model_dir``, and is written there.
      labels: the name of each class, written beside it.
      preparation: what ``prepare`` did to the images, likewise; None: unknown.
      class_values: what ``class_weights`` and ``sampling`` gave for each class, likewise.
      chief: whether this process writes; others only check.

    Raises:
      UserError: if the directory cannot be written, or holds a run with other options or classes.
    """
    directory = to_path(config.model_dir)
    _check_no_links(directory)
    check_model_dir(config, labels)
    given = {name: dict(zip(labels, values)) for name, values in (class_values or {}).items()}
    _check_class_values(directory, given)
    with _write_errors(directory):
        (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if is_local(directory) and not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied")
    if chief:
        write_file(directory / LABELS_FILE, "".join(f"{label}\n" for label in labels))
        if preparation is not None:
            write_file(directory / PREPARATION_FILE, json.dumps(preparation.job) + "\n")
        if given:
            write_file(directory / CLASS_VALUES_FILE, json.dumps(given, indent=1) + "\n")
        # Written last: where it exists, the other files do.
        write_file(directory / CONFIG_FILE, config.to_json())


def _check_no_links(directory: Path) -> None:
    """Raises a UserError for links and pipes in a run's directory: TensorFlow writes to them."""
    if not is_local(directory):
        return
    for folder, folders, files in os.walk(directory):
        for path in (pathlib.Path(folder, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # a temporary file of another worker
                continue
            if stat.S_ISLNK(mode):
                raise UserError(
                    f"{path} is a link to {path.readlink()}, where the run would write: remove the "
                    "link, or choose another --model_dir"
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise UserError(f"{path} is neither a file nor a folder: remove it")


def _check_class_values(directory: Path, given: Mapping[str, Mapping[str, float]]) -> None:
    """Checks that options by class have the values with which the run in a directory began.

    Raises:
      UserError: if their files have changed, or the recorded values cannot be read.
    """
    earlier = recorded_class_values(str(directory)) if given else {}
    if not earlier:
        return
    for option, values in given.items():
        for label, value in values.items():
            before = earlier.get(option, {}).get(label)
            if before != value:
                raise UserError(
                    f"{option} gives {value:g} to class {label!r}, but gave {before} when the run "
                    f"in {directory} began: choose another --model_dir"
                )


@contextlib.contextmanager
def alone_in(model_dir: str) -> Iterator[None]:
    """Locks ``model_dir`` for training, if the file system has locks.

    Raises:
      UserError: if another process trains there.
    """
    if not is_local(model_dir):
        yield
        return
    directory = os.open(to_path(model_dir), os.O_RDONLY)
    try:
        # A file server may keep the lock of a machine that is lost for some minutes.
        end = time.monotonic() + (_LOCK_SECONDS if TAKING_PART in os.environ else 0)
        while not _lock(directory):
            if time.monotonic() >= end:
                raise UserError(
                    f"another process is training in model_dir {model_dir}; wait for it, end it, "
                    "or choose another --model_dir"
                )
            warn_once(f"waiting for another process, which is training in model_dir {model_dir}")
            time.sleep(0.5)
        yield
    finally:
        os.close(directory)


def _lock(directory: int) -> bool:
    """Locks a folder until this process ends; returns whether no other process has locked it."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def check_model_dir(config: Config, labels: Sequence[str]) -> Config | None:
    """Checks that ``model_dir`` holds no run or this configuration's; writes nothing.

    The schedule of a run that has a checkpoint may differ, and so may ``accumulation_steps``, which
    is to be checked when the network is built.

    Returns:
      The configuration of a run with a checkpoint, which resumes; None: there is none.

    Raises:
      UserError: if it holds a run with other options or classes, or cannot be used.
    """
    directory = directory_of(config.model_dir)
    with _write_errors(directory):
        exists = (directory / CONFIG_FILE).exists()
    resumes = latest_checkpoint(directory / CHECKPOINTS) is not None
    if not exists:
        if resumes:
            raise UserError(
                f"{directory} holds checkpoints but no {CONFIG_FILE} that says from which run; "
                "choose another --model_dir"
            )
        return None
    earlier = stored_config(config.model_dir)
    _, missed = with_todays_options(read_json(directory / CONFIG_FILE, dict[str, Any]))
    if missed:
        raise UserError(
            f"the run in {directory} can be used but not resumed: {missed[0]}; choose another "
            "--model_dir"
        )
    names = [
        name
        for name in config.differences(earlier, all_options=False)
        if name not in (*SCHEDULE_OPTIONS, "accumulation_steps") or not resumes
        # Earlier versions did not record them.
        if name != "replicas" or earlier.replicas
    ]
    # A loss scale is a part of the optimizer.
    precisions = {config.precision, earlier.precision}
    if len(precisions) > 1 and "mixed_float16" in precisions:
        names.append("precision")
    if names:
        _check_model_is_given(config, earlier)
        raise other_options(names, earlier, config)
    check_labels(config, labels)
    return earlier if resumes else None


def check_network(config: Config) -> None:
    """Checks that trained weights compute with ``config`` what they compute in their run.

    Args:
      config: gives ``model_dir``, the run's.

    Raises:
      UserError: if an option of the network or of its inputs is not the run's.
    """
    run = stored_config(config.model_dir)
    _check_model_is_given(config, run)
    fields = {field.name: field for field in dataclasses.fields(Config)}
    names = [n for n in run.differences(config) if fields[n].metadata["in_evaluation"]]
    if is_custom(run.model) and is_custom(config.model):  # One function can have two names.
        names = [name for name in names if name != "model"]
    if names:
        raise UserError(
            f"the run in {config.model_dir} has other options "
            f"({differences(names, run, config)}), and its weights fit only those: leave these "
            f"options out, or in Python start from imagenet_fast.read_config({config.model_dir!r})"
        )


def _check_model_is_given(config: Config, run: Config) -> None:
    """Raises a UserError if the run's network was given in Python and this time is not."""
    if run.model == CUSTOM and not is_custom(config.model):
        raise UserError(
            f"the model of the run in {config.model_dir} was given in Python: give it again, as "
            "model=, or --model=MODULE:FUNCTION"
        )


def check_labels(options: DataOptions, labels: Sequence[str]) -> None:
    """Checks that data has the classes of the run in ``model_dir``, in the same order.

    Names are compared unless the data or the run has none, only the numbers from 0.

    Raises:
      UserError: if it has other classes.
    """
    trained = read_labels(options.model_dir)
    if tuple(labels) == trained or _same_by_number(labels, trained):
        return
    if len(labels) != len(trained):
        difference = f"{len(labels)} classes, but the run in {options.model_dir} {len(trained)}"
    else:
        number, (here, there) = next(
            (number, pair) for number, pair in enumerate(zip(labels, trained)) if len({*pair}) > 1
        )
        difference = (
            f"{here!r} as class {number}, which is {there!r} of the run in {options.model_dir}"
        )
    raise UserError(f"other classes: {options.data_dir} has {difference}")


def classes_in_run(
    options: DataOptions, labels: Sequence[str], *, may_be_mapped: bool = True
) -> tuple[int, ...]:
    """Returns the number that each class of some data has in the run in ``model_dir``, by its name.

    The data may lack classes of the run, and have them in another order. Classes without names, as
    of shards without a manifest, keep their numbers; so do the run's own, of which two may have the
    same name (ImageNet has two cranes).

    ``may_be_mapped``: whether ``class_map`` is a way out, for the message.

    Raises:
      UserError: if the run does not have one of the classes, or several of its name.
    """
    trained = read_labels(options.model_dir)
    if tuple(labels) == trained or _same_by_number(labels, trained):
        return tuple(range(len(labels)))
    unknown = [label for label in labels if label not in trained]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UserError(
            f"{options.data_dir} has classes that the run in {options.model_dir} does not: "
            f"{', '.join(map(repr, unknown[:3]))}{more}. Those of the run are in "
            f"{directory_of(options.model_dir) / LABELS_FILE}: rename or leave out the others in "
            "the source of the data, and prepare it again"
            + ", or give evaluate --class_map"
            * may_be_mapped
        )
    counts = Counter([*trained, *(label for label, count in Counter(labels).items() if count > 1)])
    repeated = [label for label in labels if counts[label] > 1]
    if repeated:
        raise UserError(
            f"the run in {options.model_dir} or {options.data_dir} has several classes named "
            f"{repeated[0]!r}, which only data with all the run's classes in its order can have"
        )
    return tuple(map(trained.index, labels))


def _same_by_number(labels: Sequence[str], trained: Sequence[str]) -> bool:
    """Returns whether classes can only be compared by number: as many, named on one side alone."""
    named = [any(not label.isdecimal() for label in names) for names in (labels, trained)]
    numbers = numbered_labels(len(labels))
    return len(labels) == len(trained) and any(named) and numbers in (tuple(labels), tuple(trained))


def read_labels(model_dir: str) -> tuple[str, ...]:
    """Returns the name of each class of the run in ``model_dir``.

    Raises:
      UserError: if there is none, or its file is damaged.
    """
    file = directory_of(model_dir) / LABELS_FILE
    try:
        *labels, end = read_bounded(file, MAX_JSON).decode().split("\n")
    except OSError as error:
        if not file.with_name(CONFIG_FILE).exists():
            reason = f"{model_dir} holds no training run: {file}: {error.strerror}"
        else:
            reason = f"{file}, the names of the run's classes, cannot be read: {error.strerror}"
        raise UserError(reason) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: {error}") from None
    if end or not labels:
        raise UserError(f"{file} is damaged: it must have one class per line")
    return tuple(labels)


def read_preparation(options: DataOptions) -> Preparation | None:
    """Returns what ``prepare`` did to the images of a run; None: unknown.

    Args:
      options: give ``model_dir``; and ``data_dir``, for runs of versions that did not record it.

    Raises:
      UserError: if its file is damaged.
    """
    file = to_path(options.model_dir, PREPARATION_FILE)
    if options.model_dir and file.exists():
        try:
            return Preparation.of(read_json(file, dict[str, Any]))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{file}: is damaged: {error}") from None
    if not options.data_dir or not to_path(options.data_dir, MANIFEST).exists():
        return None
    return read_manifest(options.data_dir).preparation


def checkpoint_of(model_dir: str, which: str = "last") -> str:
    """Returns the path of a run's ``last`` or ``best`` checkpoint, without a suffix.

    It may be damaged or lack a file.

    Raises:
      UserError: if there is none.
    """
    require_choice("checkpoint", which, CHECKPOINT_CHOICES)
    folder = CHECKPOINTS if which == "last" else BEST
    path = latest_checkpoint(directory_of(model_dir) / folder)
    if path is None and which == "last":
        raise UserError(f"{model_dir} holds no checkpoint: train there first")
    if path is None:
        raise UserError(
            f"{model_dir} holds no checkpoint of its best evaluation: only runs with --keep_best "
            "have one; --checkpoint=last is that of the last step"
        )
    if which == "best":
        stored = (directory_of(model_dir) / CONFIG_FILE).exists()
        metric = stored_config(model_dir).best_metric if stored else "auto"
        best = Evaluations.of_rows(read_rows(model_dir), metric).best
        if lost := lost_best(model_dir, best, metric):
            warn_once(lost)
    return path


def lost_best(model_dir: str, best: Row, best_metric: str = "auto") -> str:
    """Returns a sentence that says that the best evaluation has no checkpoint; empty: it has one.

    Args:
      model_dir: the run's directory.
      best: the best evaluation; empty: there is none.
      best_metric: the option.
    """
    kept = kept_step(model_dir)
    if not best or (kept is not None and kept >= best["step"]):
        return ""
    there = "lacks" if kept is None else f"has the checkpoint of step {kept}, not"
    return (
        f"{to_path(model_dir, BEST)} {there} that of the best evaluation, of step {best['step']} "
        f"({metric_text(best, metric_of(best, best_metric))}): keep_best was off then, or the "
        "checkpoint was removed"
    )


def kept_step(model_dir: str) -> int | None:
    """Returns the step of the checkpoint that ``keep_best`` has kept; None: there is none."""
    steps = checkpoint_steps(directory_of(model_dir) / BEST)
    return steps[-1] if steps else None


def latest_checkpoint(folder: Path) -> str | None:
    """Returns the path of the newest checkpoint, without a suffix; None: there is none.

    It may be damaged or lack a file.

    Args:
      folder: ``CHECKPOINTS`` or ``BEST`` of a ``model_dir``.
    """
    steps = checkpoint_steps(folder)
    return str(folder / f"ckpt-{steps[-1]}") if steps else None


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of all finished checkpoints, whole or damaged, ascending.

    Unfinished are those newer than the one that TensorFlow recorded as the latest and, without a
    record, those newer than every checkpoint with an index.
    """
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    matches = [match for name in names if (match := _CHECKPOINT_FILE.fullmatch(name))]
    steps = sorted({int(match[1]) for match in matches})
    last = recorded_step(folder)
    if last not in steps:  # The record is damaged, or its checkpoint was removed.
        finished = [match for match in matches if _RECORD in names or match[2] == "index"]
        last = max((int(match[1]) for match in finished), default=-1)
    return [step for step in steps if step <= last]


def recorded_step(folder: Path) -> int | None:
    """Returns the step of the checkpoint that TensorFlow recorded as the latest; None: no record.

    Raises:
      UserError: if the record cannot be read.
    """
    try:
        match = _LATEST.search(read_bounded(folder / _RECORD, _MAX_RECORD))
    except FileNotFoundError:
        return None
    except OSError as error:  # as of a folder or pipe
        raise UserError(f"{folder / _RECORD} cannot be read: {error.strerror}") from None
    return int(match[1]) if match else None


def record_steps(folder: Path, steps: Sequence[int]) -> None:
    """Records checkpoints, in ascending order, in TensorFlow's list; without any, removes it.

    To be called before ``tf.train.CheckpointManager`` reads it, which removes the files that it
    lists, wherever they are, and reads patterns, too.
    """
    if not steps:
        (folder / _RECORD).unlink(missing_ok=True)
        return
    names = [f"ckpt-{step}" for step in steps]
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    lines += [f"all_model_checkpoint_timestamps: {time.time()}" for _ in names]
    write_file(folder / _RECORD, "".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to model_dir {directory}: {error.strerror}; choose another --model_dir"
        ) from None
