"""The callback that reads a run's metrics and passes them to its logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.bad_images import describe
from imagenet_fast.optimizers.slots import unwrapped
from imagenet_fast.training import metric_sums
from imagenet_fast.training.callback import TensorsCallback
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.evaluations import Evaluations
from imagenet_fast.training.metrics_file import Row

_BAD_IMAGES_NAMED = 3


class RowWriter(Protocol):
    """Writes the rows of a run, such as to a file."""

    def write(self, row: Row) -> None:
        """Writes a row: ``kind`` is ``train`` or ``validation``, see :class:`Recorder`."""

    def close(self) -> None:
        """Ends writing."""


class Recorder(TensorsCallback):
    """Reads the model's metrics every few steps, checks them, and passes them on as rows.

    A row holds ``kind``, ``step`` (weight updates so far), ``epoch`` (the same in epochs),
    ``loss``, ``top1`` and ``top5`` (over the images since the last row, or over the whole
    validation set), ``examples``, ``skipped``, ``train_seconds``, ``wall_seconds`` and, in
    training, ``learning_rate`` and ``images_per_second`` (since the last row).

    Reading metrics waits for the devices, so it happens only every ``every`` steps.

    Args:
      clock: measures the run.
      writers: get the rows.
      step: weight updates before this process.
      steps_per_epoch: weight updates in an epoch.
      batch_size: images in a weight update.
      every: steps between two rows.
      max_bad_images: unreadable images allowed between two evaluations.
      evaluated_examples: images in an evaluation.
      model_dir: where unreadable images are listed; empty: nowhere.
    """

    def __init__(
        self,
        clock: Clock,
        writers: Sequence[RowWriter],
        *,
        step: int,
        steps_per_epoch: int,
        batch_size: int,
        every: int,
        max_bad_images: int,
        evaluated_examples: int,
        model_dir: str = "",
    ) -> None:
        super().__init__()
        self.step = step
        self.evaluations = Evaluations()
        self._clock = clock
        self._writers = writers
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._every = every
        self._max_bad_images = max_bad_images
        self._evaluated_examples = evaluated_examples
        self._model_dir = model_dir
        self._compiled = False
        self._untimed = 0
        self._unread: list[tf.Tensor] = []
        self._logs: dict[str, tf.Tensor] = {}
        self._read_sums = dict.fromkeys(metric_sums.NAMES, 0.0)
        self._read_time = (clock.train_seconds, clock.timed_images)

    def recompile(self) -> None:
        """Announces that the next step compiles a new program, such as for another image size."""
        if self._compiled:
            self._clock.compiling()
            self._compiled = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Follows the model, which has reset its metrics; resumes the clock."""
        self._read_sums = dict.fromkeys(self._read_sums, 0.0)
        if self._compiled:
            self._clock.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts a step."""
        self.step += 1
        self._unread.append(logs["loss"])
        self._logs = logs
        if not self._compiled:
            float(logs["loss"])
            self._clock.compiled()
            self._compiled = True
            self._untimed = 1
        if self.step % self._every == 0:
            self.read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the metrics, if no evaluation has: the model is about to reset them."""
        self.read()

    def on_test_begin(self, logs: Any = None) -> None:
        """Reads the metrics and stops the clock, which measures training."""
        self.read()
        self._clock.stop()

    def on_test_end(self, logs: Any = None) -> None:
        """Checks that each image was counted once, and passes the result on.

        Raises:
          RuntimeError: if images are missing or were counted twice.
        """
        row = {name: float(value) for name, value in (logs or {}).items()}
        check_evaluated(row, self._evaluated_examples)
        evaluation = {"kind": "validation", **self._where(), **row, **self._times()}
        self.evaluations.add(evaluation)
        self._write(evaluation)

    def on_train_end(self, logs: Any = None) -> None:
        """Reads the last metrics and stops the clock."""
        self.read()
        self._clock.stop()

    def read(self) -> None:
        """Waits for the devices and passes on a row of the steps since the last row, if any.

        Raises:
          UserError: if the loss is not finite, or too many images cannot be read.
        """
        if not self._unread:
            return
        sums = _sums(self._logs)
        self._check_finite()
        steps, self._unread = len(self._unread), []
        new = {name: sums[name] - self._read_sums[name] for name in sums}
        self._read_sums = sums
        if sums["skipped"] > self._max_bad_images:
            listed = describe(self._model_dir, examples=_BAD_IMAGES_NAMED)
            raise UserError(
                f"{sums['skipped']:.0f} images could not be read since the last evaluation, more "
                f"than max_bad_images={self._max_bad_images}; `imagenet-fast prepare --verify` "
                "finds damaged shards" + (f"; {listed}" if listed else "")
            )
        timed = steps - self._untimed
        self._untimed = 0
        self._clock.advance(timed * self._batch_size)
        examples = max(new["examples"], 1.0)
        row = {
            "kind": "train",
            **self._where(),
            **{name: new[name] / examples for name in ("loss", "top1", "top5")},
            "examples": new["examples"],
            "skipped": new["skipped"],
            "learning_rate": self._learning_rate(),
            "images_per_second": self._speed(),
            **self._times(),
        }
        self._write(row)

    def _check_finite(self) -> None:
        for place, loss in enumerate(self._unread):
            if not math.isfinite(float(loss)):
                step = self.step - len(self._unread) + place + 1
                raise UserError(
                    f"the loss is {float(loss)} at step {step} (epoch "
                    f"{step / self._steps_per_epoch:.2f}): training has diverged. A lower "
                    "--learning_rate or a longer --warmup may help; checkpoints are kept"
                )

    def _where(self) -> Row:
        return {"step": self.step, "epoch": self.step / self._steps_per_epoch}

    def _times(self) -> Row:
        return {
            "train_seconds": self._clock.train_seconds,
            "wall_seconds": self._clock.wall_seconds,
        }

    def _speed(self) -> float:
        """Returns images per second since the last row; 0 if nothing was timed."""
        seconds, images = self._read_time
        self._read_time = (self._clock.train_seconds, self._clock.timed_images)
        seconds, images = self._read_time[0] - seconds, self._read_time[1] - images
        return images / seconds if seconds > 0 else 0.0

    def _learning_rate(self) -> float:
        optimizer = unwrapped(self.model.optimizer)
        learning_rate = optimizer.learning_rate
        if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            # Optimizers of TensorFlow Addons do not store the last step's learning rate.
            learning_rate = learning_rate(optimizer.iterations - 1)
        return float(learning_rate.numpy())

    def _write(self, row: Row) -> None:
        for writer in self._writers:
            writer.write(row)


def check_evaluated(row: Row, examples: int) -> None:
    """Checks that an evaluation saw each image once.

    Raises:
      RuntimeError: if it did not, which is a bug in this package.
    """
    seen = row["examples"] + row["skipped"]
    if seen != examples:
        raise RuntimeError(f"evaluation saw {seen:.0f} images, but there are {examples}")


def _sums(logs: dict[str, tf.Tensor]) -> dict[str, float]:
    """Turns means back into sums, whose differences are those of the steps between."""
    values = {name: float(value) for name, value in logs.items()}
    means = {name: values[name] * values["examples"] for name in ("loss", "top1", "top5")}
    return {**values, **means}
