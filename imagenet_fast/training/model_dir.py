"""A run's ``model_dir``: claiming it, and reading its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_no_pattern, write_file
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.config import Config
from imagenet_fast.data.info import numbered_labels
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.distribute.workers import is_chief

CONFIG_FILE = "config.json"
LABELS_FILE = "labels.txt"
# The folder of them.
CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"ckpt-(\d+)")
_CHECKPOINT_FILE = re.compile(r"ckpt-(\d+)\.(index|data-\d{5}-of-\d{5})")


def claim_model_dir(config: Config, labels: Sequence[str]) -> None:
    """Makes ``model_dir`` this configuration's, or checks that it is already.

    Args:
      config: gives ``model_dir``, and is written there.
      labels: the name of each class, written beside it.

    Raises:
      UserError: if it cannot be written, or holds a run with other options or classes.
    """
    check_model_dir(config, labels)
    directory = to_path(config.model_dir)
    with _to_be_written(directory):
        (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if is_local(directory) and not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied")
    if is_chief(make_strategy(config)):
        write_file(directory / LABELS_FILE, "".join(f"{label}\n" for label in labels))
        # Last: it says that the others are there.
        write_file(directory / CONFIG_FILE, config.to_json())


@contextlib.contextmanager
def alone_in(model_dir: str) -> Iterator[None]:
    """Keeps other processes from training in ``model_dir``, where the file system has locks.

    Raises:
      UserError: if another one does.
    """
    if not is_local(model_dir):
        yield
        return
    directory = os.open(to_path(model_dir), os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            raise UserError(
                f"another process is training in model_dir {model_dir}; wait for it, end it, or "
                "choose another --model_dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(directory)


def check_model_dir(config: Config, labels: Sequence[str]) -> None:
    """Checks that ``model_dir`` holds no run, or one of this configuration; writes nothing.

    Args:
      config: gives ``model_dir`` and ``data_dir``.
      labels: the name of each class of the data.

    Raises:
      UserError: if it holds a run with other options or classes, or cannot be used at all.
    """
    directory = directory_of(config.model_dir)
    with _to_be_written(directory):
        exists = (directory / CONFIG_FILE).exists()
    if not exists:
        if latest_checkpoint(directory / CHECKPOINTS):
            raise UserError(
                f"{directory} holds checkpoints but no {CONFIG_FILE} to tell whose they are; "
                "choose another --model_dir"
            )
        return
    found = read_config(config.model_dir)
    names = config.differences(found, free=False)
    if names:
        told = "; ".join(
            f"{name} is {option_text(getattr(found, name))} there, "
            f"{option_text(getattr(config, name))} here"
            for name in names
        )
        raise UserError(
            f"{directory} holds a run with other options ({told}); choose another "
            "--model_dir, or remove that one"
        )
    check_labels(config, labels)


def check_labels(config: Config, labels: Sequence[str]) -> None:
    """Checks that data has the classes of the run in ``model_dir``: where both have names, these.

    Args:
      config: gives ``model_dir`` and ``data_dir``.
      labels: the name of each class of the data.

    Raises:
      UserError: if it has others.
    """
    trained = read_labels(config.model_dir)
    if len(labels) != len(trained):
        difference = f"{len(labels)} classes, but the run in {config.model_dir} {len(trained)}"
    elif numbered_labels(len(labels)) in (trained, tuple(labels)):
        return
    else:
        pairs = enumerate(zip(labels, trained))
        found = next((number for number, (here, there) in pairs if here != there), None)
        if found is None:
            return
        difference = (
            f"{labels[found]!r} as class {found}, which is {trained[found]!r} of the run in "
            f"{config.model_dir}"
        )
    raise UserError(f"other classes: {config.data_dir} has {difference}")


def read_config(model_dir: str) -> Config:
    """Returns the configuration of the run in ``model_dir``.

    Raises:
      UserError: if there is none.
    """
    file = directory_of(model_dir) / CONFIG_FILE
    try:
        return Config.from_json(file.read_text(encoding="utf-8")).replace(model_dir=model_dir)
    except OSError as error:
        raise UserError(f"{model_dir} holds no training run: {file}: {error.strerror}") from None
    except ValueError as error:  # a UserError, or bytes that are no text
        raise UserError(f"{file}: {error}") from None


def read_labels(model_dir: str) -> tuple[str, ...]:
    """Returns the name of each class of the run in ``model_dir``.

    Raises:
      UserError: if there is none, or its file is damaged.
    """
    file = directory_of(model_dir) / LABELS_FILE
    try:
        *labels, end = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"{model_dir} holds no training run: {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: {error}") from None
    if end or not labels:
        raise UserError(f"{file} is damaged: it must have a class in each line")
    return tuple(labels)


def directory_of(model_dir: str) -> Path:
    """Returns the path of ``model_dir``.

    Raises:
      UserError: if none is given, as the working directory is not meant, or TensorFlow would take
        it for a pattern.
    """
    if not model_dir:
        raise UserError("no model: give --model_dir, the directory of a training run")
    directory = to_path(model_dir)
    check_no_pattern(directory)
    return directory


def latest_checkpoint(folder: Path) -> str | None:
    """Returns the path of the newest checkpoint, without an ending; None: there is none.

    It may be damaged, and one of its files missing.

    Args:
      folder: ``CHECKPOINTS`` of a ``model_dir``.
    """
    steps = checkpoint_steps(folder)
    return str(folder / f"ckpt-{steps[-1]}") if steps else None


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of which there are checkpoints, whole or damaged, ascending.

    One that is newer than what TensorFlow has noted as the latest is not finished, and not among
    them; nor is one without an index that is newer than all others where nothing is noted.

    Args:
      folder: ``CHECKPOINTS`` of a ``model_dir``.
    """
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    found = [match for name in names if (match := _CHECKPOINT_FILE.fullmatch(name))]
    steps = sorted({int(match[1]) for match in found})
    last = noted_step(folder)
    if last not in steps:  # The note is damaged, or what it names was removed.
        finished = [match for match in found if "checkpoint" in names or match[2] == "index"]
        last = max((int(match[1]) for match in finished), default=-1)
    return [step for step in steps if step <= last]


def noted_step(folder: Path) -> int | None:
    """Returns the step of the checkpoint that TensorFlow has noted as the latest; None: of none.

    Args:
      folder: ``CHECKPOINTS`` of a ``model_dir``.
    """
    try:
        state = tf.train.get_checkpoint_state(str(folder))
    except ValueError:  # also bytes that are no text
        return None
    name = state.model_checkpoint_path.rpartition("/")[2] if state else ""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


@contextlib.contextmanager
def _to_be_written(directory: Path) -> Iterator[None]:
    """Tells in a line that it cannot be used."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to model_dir {directory}: {error.strerror}; choose another --model_dir"
        ) from None
