"""Checkpoints from which a run resumes to the same bits as an uninterrupted run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from typing import Any, TypedDict

import tensorflow as tf

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.keras_2 import name_of, tensorflow_variables
from imagenet_fast.base.outside import Count, as_type, parse_json
from imagenet_fast.base.paths import to_path
from imagenet_fast.distribute.exchange import text_of_chief
from imagenet_fast.distribute.one_call import assign_everywhere, restored_everywhere
from imagenet_fast.distribute.workers import worker_place
from imagenet_fast.layers.seeds import seed_states
from imagenet_fast.models.custom import use_restored_statistics
from imagenet_fast.optimizers.slots import state_of
from imagenet_fast.training.checkpoints.damaged import damage_of, whole_checkpoint
from imagenet_fast.training.checkpoints.model_dir import (
    BEST,
    CHECKPOINTS,
    checkpoint_of,
    checkpoint_steps,
    latest_checkpoint,
    record_steps,
)
from imagenet_fast.training.checkpoints.of_tf_keras import (
    is_of_tf_keras,
    keys_of_tf_keras,
    shadows_of_tf_keras,
    weights_of_tf_keras,
)
from imagenet_fast.training.checkpoints.sizes import claimed_too_large
from imagenet_fast.training.failures import writing
from imagenet_fast.training.options import RunOptions
from imagenet_fast.training.step.classifier import Classifier

_WEIGHT = re.compile(r"weights/(\d+)/\.ATTRIBUTES/VARIABLE_VALUE")
_UNREADABLE = (AssertionError, ValueError, IndexError, tf.errors.OpError)
# The last one on tf_keras.
_VERSION = "imagenet_fast 0.1"
# Advice on a damaged checkpoint.
_RESUMES = "the run's `train` command sets it aside and resumes from the one before it"


class Checkpoints:
    """Saves and restores a run: weights, optimizer, loss scale, random states, step, clock.

    A checkpoint gets its name when it is complete; the latest ones are kept, and that of the best
    evaluation. All workers call :meth:`save` together, since batch-norm statistics are averaged
    over all; only the chief's file is kept. All workers restore from it, so all must be able to
    read ``model_dir``.

    The model is compiled, and made in its strategy's scope.
    """

    def __init__(self, model: Classifier, options: RunOptions) -> None:
        self._model = model
        self._state = _State()
        model.make_slots()  # so that they are in the checkpoint
        self._random = tensorflow_variables(seed_states(model))
        self._checkpoint = self._of(self._random)
        self._options = options
        self._folder = to_path(options.model_dir, CHECKPOINTS)
        _, place = worker_place(model.distribute_strategy)
        self._chief = place == 0
        self._temporary = None if self._chief else _temporary_folder(options.model_dir, place)

    def _of(self, random: list[tf.Variable]) -> tf.train.Checkpoint:
        """Returns what TensorFlow saves and restores, with these random states."""
        return tf.train.Checkpoint(
            state=self._state,
            optimizer=state_of(self._model.optimizer),
            random=random,
            **_weights(self._model),
            **self._model.selection.checkpoint,
        )

    @functools.cached_property
    def _manager(self) -> tf.train.CheckpointManager:
        # Made after restoring, which may set checkpoints aside.
        return self._manager_in(CHECKPOINTS, self._options.keep_checkpoints)

    @functools.cached_property
    def _best_manager(self) -> tf.train.CheckpointManager:
        return self._manager_in(BEST, 1)

    def _manager_in(self, folder: str, keep: int) -> tf.train.CheckpointManager:
        path = to_path(self._temporary or self._options.model_dir, folder)
        record_steps(path, checkpoint_steps(path))
        return tf.train.CheckpointManager(self._checkpoint, str(path), max_to_keep=keep)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Args:
          step: weight updates so far.
          state: other values to restore, as JSON values.

        Raises:
          UserError: if it cannot be written, as to a full disk.
        """
        self._state.value = state
        with self._model.averaged_batch_norm_statistics():
            self._write(self._manager, step)

    def save_best(self, step: int, state: dict[str, Any]) -> None:
        """Writes the checkpoint of the best evaluation, in place of the one before.

        To be called right after the evaluation, which has averaged the batch-norm statistics.
        Changes no weights, so that a run takes the same steps without it.

        Raises:
          UserError: if it cannot be written, as to a full disk.
        """
        self._state.value = state
        with self._model.batch_norm_statistics_of_first_replica():
            self._write(self._best_manager, step)

    def _write(self, manager: tf.train.CheckpointManager, step: int) -> None:
        path = to_path(manager.directory, f"ckpt-{step}")
        try:
            with writing("checkpoint", str(path), "resumes from the one before it"):
                manager.save(checkpoint_number=step, options=_options())
        except UserError:
            shutil.rmtree(f"{path}_temp", ignore_errors=True)
            raise

    def restore(self) -> dict[str, Any] | None:
        """Restores the latest checkpoint and returns its ``state``; None if there is none.

        All workers must call it; they restore the newest checkpoint that the chief finds undamaged.

        Raises:
          UserError: if it is another model's, or all are damaged.
        """
        latest = self._latest()
        if latest is None:
            return None
        _check_claims(latest, _RESUMES)
        _check_version(latest)
        try:
            _check_weights(latest, self._model)
            earlier = _earlier_random(latest, len(self._random))
            own = [earlier.get(place, state) for place, state in enumerate(self._random)]
            checkpoint = self._of(own) if earlier else self._checkpoint
            with restored_everywhere(checkpoint):
                status = checkpoint.restore(latest, options=_options())
            status.expect_partial().assert_existing_objects_matched()
            if earlier:
                states = [self._random[place] for place in earlier]
                assign_everywhere(states, [value.numpy() for value in earlier.values()])
        except _UNREADABLE as error:
            raise _unreadable(latest, error, _RESUMES) from error
        use_restored_statistics(self._model)
        return self._state.value

    def _latest(self) -> str | None:
        """Returns the checkpoint from which all workers resume."""
        answer = {"name": ""}
        if self._chief:
            try:
                whole = whole_checkpoint(self._options.model_dir)
                answer = {"name": to_path(whole).name if whole else ""}
            except UserError as error:
                answer = {"error": str(error)}
        answer = json.loads(text_of_chief(self._model.distribute_strategy, json.dumps(answer)))
        if "error" in answer:
            raise UserError(answer["error"])
        if answer["name"] and (self._folder / f"{answer['name']}.index").exists():
            return str(self._folder / answer["name"])
        # This worker has another folder than the chief: an error once they compare their steps.
        return latest_checkpoint(self._folder)

    def close(self) -> None:
        """Removes the files of a worker other than the chief."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def check_resumable(model_dir: str) -> None:
    """Checks that this version can resume the run in ``model_dir``, if there is one.

    Raises:
      UserError: if it was begun with tf_keras.
    """
    latest = latest_checkpoint(to_path(model_dir, CHECKPOINTS))
    if latest is None:
        return
    with contextlib.suppress(OSError):  # of damaged ones, which are set aside later
        if not claimed_too_large(latest):
            _check_version(latest)


def restore_weights(model: Classifier, model_dir: str, which: str = "last") -> str:
    """Restores the weights of a ``last`` or ``best`` checkpoint in any precision; returns its path.

    Restores their moving average too, if the model keeps one.

    Raises:
      UserError: if there is none, or it is another model's, or damaged.
    """
    path = checkpoint_of(model_dir, which)
    advice = _RESUMES if which == "last" else "--checkpoint=last is that of the last step"
    _check_claims(path, advice)
    try:
        if is_of_tf_keras(path):
            _restore_from_tf_keras(model, path)
        else:
            _check_weights(path, model)
            # Without the optimizer, which depends on the precision.
            checkpoint = tf.train.Checkpoint(**_weights(model))
            with restored_everywhere(checkpoint):
                status = checkpoint.restore(path, options=_options())
            status.expect_partial().assert_existing_objects_matched()
    except _UNREADABLE as error:
        raise _unreadable(path, error, advice) from error
    use_restored_statistics(model)
    return path


def _options() -> tf.train.CheckpointOptions:
    """Returns options that make this process do the I/O, even of variables on other hosts."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.train.CheckpointOptions(experimental_io_device=tf.zeros([]).device)


def _weights(model: Classifier) -> dict[str, list[tf.Variable]]:
    """Returns the model's weights and shadow weights by their names in checkpoints."""
    shadows = {"weight_averages": model.weight_average, "slow_weights": model.lookahead}
    kept = {name: shadow.averages for name, shadow in shadows.items() if shadow is not None}
    return {"weights": tensorflow_variables(model.weights), **kept}


def _check_weights(path: str, model: Classifier) -> None:
    """Raises a ValueError if a checkpoint has weights of other shapes than a model, or more.

    TensorFlow would name no weight, leave warnings behind, and ignore further weights.
    """
    try:
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (ValueError, tf.errors.OpError):  # explained where it is restored
        return
    there = {
        int(match[1]): tuple(shapes[name])
        for name in shapes
        if (match := _WEIGHT.fullmatch(name)) is not None
    }
    for number, weight in enumerate(model.weights):
        own = tuple(weight.shape)
        if there.get(number, own) != own:
            raise ValueError(f"{name_of(weight)} has shape {own}, but {there[number]} there")
    if len(there) > len(model.weights):
        raise ValueError(f"the model has {len(model.weights)} weights, but {len(there)} are there")


def _earlier_random(path: str, count: int) -> dict[int, tf.Variable]:
    """Returns variables for a checkpoint's random states of earlier versions, by their places.

    These had Keras' type.
    """
    if not count:  # of most networks: nothing to read
        return {}
    try:
        dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    except (ValueError, tf.errors.OpError):  # explained where it is restored
        return {}
    names = (f"random/{place}/.ATTRIBUTES/VARIABLE_VALUE" for place in range(count))
    return {
        place: tf.Variable(tf.zeros([2], tf.uint32), trainable=False)
        for place, name in enumerate(names)
        if dtypes.get(name) == tf.uint32
    }


def _restore_from_tf_keras(model: Classifier, path: str) -> None:
    parts, keys = _weights(model), keys_of_tf_keras(path, model)
    assign_everywhere(parts.pop("weights"), weights_of_tf_keras(path, keys))
    dtypes = [tf.as_dtype(variable.dtype) for variable in model.weights]
    floats = [key for key, dtype in zip(keys, dtypes) if dtype.is_floating]
    for shadow, variables in parts.items():
        assign_everywhere(variables, shadows_of_tf_keras(path, shadow, floats))


def _check_version(path: str) -> None:
    """Raises a UserError if a checkpoint, which TensorFlow may read, is tf_keras'."""
    if is_of_tf_keras(path):
        raise UserError(
            f"checkpoint {path} is of a run that was begun with tf_keras (Keras 2), which this "
            "version can evaluate, export and take as --initial_weights, but not resume: go on "
            f"with the version that began it ({_VERSION}), or choose another --model_dir"
        )


def _check_claims(path: str, advice: str) -> None:
    """Raises a UserError if TensorFlow must not read a checkpoint."""
    try:
        damage = claimed_too_large(path)
    except OSError as error:
        damage = f"{to_path(error.filename).name}: {error.strerror}"
    if damage:
        raise UserError(f"checkpoint {path} is damaged ({damage}); {advice}")


def _unreadable(path: str, error: Exception, advice: str) -> UserError:
    damage = damage_of(path)
    if damage is not None:
        return UserError(f"checkpoint {path} is damaged ({damage}); {advice}")
    return UserError(
        f"checkpoint {path} is another model's ({first_line(error)[:200]}); give the model that "
        "was trained there, or choose another --model_dir"
    )


def _temporary_folder(model_dir: str, place: int) -> str:
    """Returns a new folder on this machine for a worker other than the chief.

    Removes what a killed worker with this number has left.
    """
    name = zlib.crc32(str(to_path(model_dir).resolve()).encode())
    prefix = f"imagenet-fast-{name:08x}-worker-{place}-"
    for left in pathlib.Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)  # of a link, nothing
    return tempfile.mkdtemp(prefix=prefix)


class _Clock(TypedDict):
    train_seconds: float
    timed_images: float
    compile_seconds: float
    wall_seconds: float


class _Evaluation(TypedDict, total=False):
    step: Count
    top1: float


class _Sums(TypedDict):
    loss: float
    top1: float
    top5: float
    examples: float
    skipped: float


class _Saved(TypedDict, total=False):
    """The types of the values in a checkpoint's state; earlier versions lack some."""

    step: Count
    clock: _Clock
    sums: _Sums
    row_sums: _Sums
    validation: _Evaluation
    best: _Evaluation
    evaluations_since_best: Count
    train_examples: Count
    train_checksum: str
    teacher_checksum: Count


class _State(tf.train.experimental.PythonState):
    """JSON in the checkpoint, from the same step as the variables."""

    def __init__(self) -> None:
        super().__init__()
        self.value: dict[str, Any] = {}

    def serialize(self) -> str:
        return json.dumps(self.value)

    def deserialize(self, string_value: str | bytes) -> None:
        self.value = parse_json(string_value, dict[str, Any])
        as_type(self.value, _Saved)
