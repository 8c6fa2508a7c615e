"""Checkpoints from which a run goes on as if it had never stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.config import Config, option_text
from imagenet_fast.data.info import numbered_labels
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.strategy import is_chief, make_strategy
from imagenet_fast.errors import UserError
from imagenet_fast.files import check_no_pattern, write_file
from imagenet_fast.paths import Path, is_local, to_path
from imagenet_fast.training.classifier import Classifier

CONFIG_FILE = "config.json"
LABELS_FILE = "labels.txt"
_FOLDER = "checkpoints"
_INDEX = re.compile(r"ckpt-(\d+)\.index")
# Where there is no space, or no permission any more.
_UNWRITABLE = (
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
)
_UNREADABLE = (AssertionError, ValueError, IndexError, tf.errors.OpError)


class Checkpoints:
    """Saves and restores a run: weights, optimizer, loss scale, step, clock.

    A checkpoint appears under its name when it is whole; the last ones are kept. All workers must
    call :meth:`save` together, since each holds a part of what is averaged; the chief's file is
    kept. All restore from it, so that ``model_dir`` must be one that every worker can read.

    Args:
      model: compiled and made in its strategy's scope.
      config: gives ``model_dir`` and ``keep_checkpoints``.
    """

    def __init__(self, model: Classifier, config: Config) -> None:
        self._model = model
        self._state = _State()
        self._checkpoint = tf.train.Checkpoint(model=model, state=self._state, **_averages(model))
        self._folder = to_path(config.model_dir, _FOLDER)
        # A worker killed without notice leaves its files; the next one of its place removes them.
        chief = is_chief(model.distribute_strategy)
        self._temporary = None if chief else _temporary_folder(config.model_dir)
        own = self._temporary or self._folder
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(own), max_to_keep=config.keep_checkpoints
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Args:
          step: weight updates so far.
          state: whatever else the run must know, as JSON can hold it.

        Raises:
          UserError: if it cannot be written, as to a full disk.
        """
        self._model.average_batch_norm_statistics()
        self._state.value = state
        try:
            self._manager.save(checkpoint_number=step, options=_options())
        except (OSError, *_UNWRITABLE) as error:
            if not is_local(self._manager.directory):
                raise  # what a bucket answers is told by errors_explained
            own = pathlib.Path(self._manager.directory)
            shutil.rmtree(own / f"ckpt-{step}_temp", ignore_errors=True)
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            # TensorFlow names a temporary file and its operation before it says why.
            reason = reason.rpartition("; ")[2][-200:]
            raise UserError(
                f"checkpoint {own / f'ckpt-{step}'} cannot be written ({reason}); when that is "
                "mended, the same command goes on from the one before it"
            ) from error

    def restore(self) -> dict[str, Any] | None:
        """Restores the latest checkpoint and returns its ``state``; None if there is none.

        Raises:
          UserError: if it is another model's, or damaged.
        """
        latest = _latest(self._folder)
        if latest is None:
            return None
        # Slots exist only once the optimizer is built, and are then checked with all else.
        self._model.make_slots()
        try:
            status = self._checkpoint.restore(latest, options=_options())
            status.assert_existing_objects_matched()
        except _UNREADABLE as error:
            raise _unreadable(latest, error) from error
        return self._state.value

    def close(self) -> None:
        """Removes what a worker other than the chief wrote."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def restore_weights(model: Classifier, model_dir: str) -> str:
    """Restores the weights of the latest checkpoint in ``model_dir``, whatever its precision.

    Their moving average is restored too, if the model keeps one.

    Returns:
      The checkpoint's path.

    Raises:
      UserError: if there is none, or it is another model's, or damaged.
    """
    latest = _latest(_directory(model_dir) / _FOLDER)
    if latest is None:
        raise UserError(f"{model_dir} holds no checkpoint: train there first")
    # Without the optimizer, which is another one under another precision.
    network = keras.Model(model.inputs, model.outputs)
    try:
        checkpoint = tf.train.Checkpoint(model=network, **_averages(model))
        status = checkpoint.restore(latest, options=_options())
        status.expect_partial().assert_existing_objects_matched()
    except _UNREADABLE as error:
        raise _unreadable(latest, error) from error
    return latest


def on_one_device(config: Config) -> Config:
    """Returns the configuration of the same network in float32, made whole on one device.

    Its weights are those of the run, and so is what it computes, but for rounding.
    """
    return config.replace(
        precision="float32", loss_scale=0.0, pipeline_stages=1, batch_norm_batch_size=0
    )


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
        (directory / _FOLDER).mkdir(parents=True, exist_ok=True)
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
    directory = _directory(config.model_dir)
    with _to_be_written(directory):
        exists = (directory / CONFIG_FILE).exists()
    if not exists:
        if _latest(directory / _FOLDER):
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
    file = _directory(model_dir) / CONFIG_FILE
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
    file = _directory(model_dir) / LABELS_FILE
    try:
        *labels, end = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"{model_dir} holds no training run: {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: {error}") from None
    if end or not labels:
        raise UserError(f"{file} is damaged: it must have a class in each line")
    return tuple(labels)


def _directory(model_dir: str) -> Path:
    """Returns ``model_dir`` if there is one: the working directory is not meant."""
    if not model_dir:
        raise UserError("no model: give --model_dir, the directory of a training run")
    directory = to_path(model_dir)
    check_no_pattern(directory)
    return directory


@contextlib.contextmanager
def _to_be_written(directory: Path) -> Iterator[None]:
    """Tells in a line that it cannot be used."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to model_dir {directory}: {error.strerror}; choose another --model_dir"
        ) from None


def _options() -> tf.train.CheckpointOptions:
    """Returns options by which this process writes and reads, also for variables in others."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.train.CheckpointOptions(experimental_io_device=tf.zeros([]).device)


def _averages(model: Classifier) -> dict[str, Any]:
    """Returns what a checkpoint holds beside the model, if it keeps copies of its weights."""
    copies = {"weight_averages": model.weight_average, "slow_weights": model.lookahead}
    return {name: own.averages for name, own in copies.items() if own is not None}


def _latest(folder: Path) -> str | None:
    """Returns the path of the newest checkpoint, without an ending; None: there is none."""
    latest = tf.train.latest_checkpoint(str(folder))
    if latest is not None or not folder.is_dir():
        return latest
    # That tells only of the last one that was written, which may have been removed since.
    found = [_INDEX.fullmatch(path.name) for path in folder.iterdir()]
    steps = [int(match[1]) for match in found if match]
    return str(folder / f"ckpt-{max(steps)}") if steps else None


def _unreadable(path: str, error: Exception) -> UserError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    cut_off = isinstance(error, (IndexError, tf.errors.OutOfRangeError, tf.errors.DataLossError))
    # Of a wrong bit TensorFlow's reader says no more than by its message.
    if cut_off or "Checksum does not match" in str(error):
        return UserError(
            f"checkpoint {path} is damaged ({reason[:200]}); remove its files, {path}.*, to go on "
            "with the one before it"
        )
    return UserError(
        f"checkpoint {path} is not of this model ({reason[:200]}); choose another --model_dir"
    )


def _temporary_folder(model_dir: str) -> pathlib.Path:
    """Returns an empty folder on this machine for what a worker other than the chief writes."""
    index = Cluster.from_environment().index
    owner = f"{os.getuid()}:{to_path(model_dir).resolve()}"
    name = f"imagenet-fast-{zlib.crc32(owner.encode()):08x}-worker-{index}"
    folder = pathlib.Path(tempfile.gettempdir(), name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


class _State(tf.train.experimental.PythonState):
    """JSON beside the variables, so that both are of the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.value: dict[str, Any] = {}

    def serialize(self) -> str:
        return json.dumps(self.value)

    def deserialize(self, string_value: str | bytes) -> None:
        self.value = json.loads(string_value)
