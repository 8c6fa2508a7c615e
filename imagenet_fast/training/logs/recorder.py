"""Reads a run's metrics, checks them and passes them to its loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.bad_images import describe
from imagenet_fast.optimizers.slots import unwrapped
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.logger import Logger, Row
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.training_step import TrainingStep

_BAD_IMAGES_NAMED = 3


class Recorder:
    """Counts a run's steps; turns the model's metrics into rows now and then.

    A row holds ``kind``, ``step`` (weight updates so far), ``epoch`` (the same in epochs),
    ``loss``, ``top1`` and ``top5`` (over the images since the last row, or over the whole
    validation set; of multi-label data ``map``, ``f1_micro`` and ``f1_macro`` of the validation set
    in place of both), ``examples``, ``skipped``, ``train_seconds``, ``wall_seconds`` and, in
    training, ``learning_rate`` and ``images_per_second`` (since the last row).

    Args:
      run: the run.
      model: sums its metrics.
      clock: measures the run.
      loggers: get the rows.
      evaluations: of the run so far.
      step: weight updates before this process.
      sums: of metrics since the last evaluation, from the checkpoint of that step, so that rows
        are those of a run without interruption, to the bit; empty: none.
      row_sums: the same at the last row; empty: that was at the checkpoint's step.

    Attributes:
      step: weight updates so far.
      evaluations: of the run so far.
    """

    def __init__(
        self,
        run: Run,
        model: TrainingStep,
        clock: Clock,
        loggers: Sequence[Logger],
        evaluations: Evaluations,
        *,
        step: int,
        sums: Mapping[str, float] = MappingProxyType({}),
        row_sums: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.step, self.evaluations = step, evaluations
        self._run, self._model, self._clock, self._loggers = run, model, clock, loggers
        # Of images with several labels, average precision needs all images at once.
        self._means = ("loss",) if run.info.multi_label else ("loss", "top1", "top5")
        self._unread = self._untimed = 0  # steps
        self._read_time = (clock.train_seconds, clock.timed_images)
        self.restart()
        if sums:
            model.metric_sums.restore(sums)
            self._read_sums = dict(row_sums) or model.metric_sums.sums()

    def sums(self) -> dict[str, dict[str, float]]:
        """Returns the arguments ``sums`` and ``row_sums`` of a recorder that goes on from here."""
        return {"sums": self._model.metric_sums.sums(), "row_sums": self._read_sums}

    def restart(self) -> None:
        """Sets the model's metrics to zero, as before the first step after an evaluation."""
        self._model.reset_metrics()
        self._read_sums = self._model.metric_sums.sums()

    def count(self, step: int, diverged: int | None = None, *, compiled: bool = False) -> None:
        """Counts the steps of a call.

        Args:
          step: weight updates so far.
          diverged: the first of them whose loss was not finite; None: all were.
          compiled: whether the call compiled its program: its one step is not timed.

        Raises:
          UserError: if the loss is not finite.
        """
        self._unread += step - self.step
        if compiled:
            self._clock.compiled()
            self._untimed += step - self.step
        self.step = step
        if diverged is not None:
            sums = self._model.metric_sums.sums()
            raise UserError(
                f"the loss is {sums['loss'] / sums['examples']} at step {diverged} (epoch "
                f"{diverged / self._run.steps_per_epoch:.2f}): training has diverged. A lower "
                "--learning_rate or a longer --warmup may help; checkpoints are kept"
            )

    def evaluated(self, metrics: Mapping[str, tf.Tensor | float]) -> None:
        """Passes on the metrics of an evaluation.

        Raises:
          RuntimeError: if images are missing or were counted twice.
        """
        row = {name: float(value) for name, value in metrics.items()}
        check_evaluated(row, self._run.examples("validation"))
        evaluation = {"kind": "validation", **self._where(), **row, **self._times()}
        self.evaluations.add(evaluation)
        self._write(evaluation)

    def read(self) -> None:
        """Passes on a row of the steps since the last row, if any.

        Raises:
          UserError: if too many images cannot be read.
        """
        if not self._unread:
            return
        sums = self._model.metric_sums.sums()
        steps, self._unread = self._unread, 0
        new = {name: sums[name] - self._read_sums[name] for name in sums}
        self._read_sums = sums
        config = self._run.config
        if sums["skipped"] > config.max_bad_images:
            listed = describe(config.model_dir, examples=_BAD_IMAGES_NAMED)
            raise UserError(
                f"{sums['skipped']:.0f} images could not be read since the last evaluation, more "
                f"than max_bad_images={config.max_bad_images}; `imagenet-fast prepare --verify` "
                "finds damaged shards" + (f"; {listed}" if listed else "")
            )
        self._check_loss_scale()
        timed = steps - self._untimed
        self._untimed = 0
        self._clock.advance(timed * config.batch_size)
        examples = max(new["examples"], 1.0)
        row = {
            "kind": "train",
            **self._where(),
            **{name: new[name] / examples for name in self._means},
            "examples": new["examples"],
            "skipped": new["skipped"],
            "learning_rate": self._learning_rate(),
            "images_per_second": self._speed(),
            **self._times(),
        }
        self._write(row)

    def _check_loss_scale(self) -> None:
        """Warns if gradients overflow even with a loss scale below 1."""
        scale = getattr(self._model.optimizer, "dynamic_scale", None)  # of Keras 3
        if scale is not None and float(scale.numpy()) < 1:
            warn_once(
                "gradients overflow float16 even without a loss scale, and such steps leave the "
                "weights as they are: train with --precision=mixed_bfloat16 or float32"
            )

    def _where(self) -> Row:
        return {"step": self.step, "epoch": self.step / self._run.steps_per_epoch}

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
        optimizer = unwrapped(self._model.optimizer)
        # Keras' ``learning_rate`` of a schedule is that of the next step.
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None:  # of TensorFlow Addons
            rate = optimizer.learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(tf.convert_to_tensor(optimizer.iterations) - 1)
        return float(rate.numpy())

    def _write(self, row: Row) -> None:
        for logger in self._loggers:
            logger.write(row)


def check_evaluated(row: Row, examples: int) -> None:
    """Checks that an evaluation saw each image once.

    Raises:
      RuntimeError: if it did not, which is a bug in this package.
    """
    seen = row["examples"] + row["skipped"]
    if seen != examples:
        raise RuntimeError(f"evaluation saw {seen:.0f} images, but there are {examples}")
