"""What a run tells of itself while it goes: one row of numbers at a time, to several readers."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf
import tf_keras as keras
from tqdm import tqdm

from imagenet_fast.data.bad_images import describe
from imagenet_fast.errors import UserError
from imagenet_fast.files import LineFile
from imagenet_fast.paths import seconds_between_writes, to_path
from imagenet_fast.training import totals
from imagenet_fast.training.clock import Clock

Row = dict[str, Any]
METRICS_FILE = "metrics.jsonl"
_BAD_IMAGES_TOLD = 3
# More than are ever written together, so that their number does not split them.
_SCALARS_AT_ONCE = 10_000


class Reader(Protocol):
    """Takes the rows of a run."""

    def write(self, row: Row) -> None:
        """Takes a row: ``kind`` is ``train`` or ``validation``, see :class:`Recorder`."""

    def close(self) -> None:
        """The run has ended."""


class Recorder(keras.callbacks.Callback):
    """Reads the model's metrics now and then, checks them, and passes them on as rows.

    A row holds ``kind``, ``step`` (weight updates so far), ``epoch`` (the same in epochs),
    ``loss``, ``top1`` and ``top5`` (of the images since the last row of its kind, or of the whole
    validation set), ``examples``, ``skipped``, ``learning_rate``, ``images_per_second`` (since the
    last row; training only), ``train_seconds`` and ``wall_seconds``.

    Metrics are read, and the devices waited for, only every ``every`` steps.

    Args:
      clock: measures the run.
      readers: take the rows.
      step: weight updates before this process.
      steps_per_epoch: weight updates in an epoch.
      batch_size: images in a weight update.
      every: steps between two rows.
      max_bad_images: unreadable images since the last evaluation that stop the run.
      evaluated_examples: images that an evaluation must have seen.
      model_dir: where unreadable images are listed; empty: nowhere.
    """

    # Keras would read the metrics at each step otherwise.
    _supports_tf_logs = True

    def __init__(
        self,
        clock: Clock,
        readers: Sequence[Reader],
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
        self.validation: Row = {}
        self._clock = clock
        self._readers = readers
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
        self._read_sums = dict.fromkeys(totals.NAMES, 0.0)
        self._read_time = (clock.train_seconds, clock.timed_images)

    def recompile(self) -> None:
        """The next step compiles a program of its own, as that of images of another size."""
        if self._compiled:
            self._clock.compiling()
            self._compiled = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The model has started to sum anew, and training goes on unless it has to be compiled."""
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
        """Reads what an evaluation has not: the model is about to sum anew."""
        self.read()

    def on_test_begin(self, logs: Any = None) -> None:
        """Evaluation is not training time."""
        self.read()
        self._clock.stop()

    def on_test_end(self, logs: Any = None) -> None:
        """Checks that each image was counted once, and passes the result on.

        Raises:
          RuntimeError: if images are missing or were counted twice.
        """
        row = {name: float(value) for name, value in (logs or {}).items()}
        check_evaluated(row, self._evaluated_examples)
        self.validation = {"kind": "validation", **self._where(), **row, **self._times()}
        self._write(self.validation)

    def on_train_end(self, logs: Any = None) -> None:
        """Reads what is left."""
        self.read()
        self._clock.stop()

    def read(self) -> None:
        """Waits for the devices and passes on what has come since the last row.

        Raises:
          UserError: if the loss is not finite any more, or too many images cannot be read.
        """
        if not self._unread:
            return
        sums = _sums(self._logs)
        self._check_finite()
        steps, self._unread = len(self._unread), []
        new = {name: sums[name] - self._read_sums[name] for name in sums}
        self._read_sums = sums
        if sums["skipped"] > self._max_bad_images:
            listed = describe(self._model_dir, examples=_BAD_IMAGES_TOLD)
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
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = optimizer.learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            # Those of TensorFlow Addons do not keep what the last step took.
            rate = rate(optimizer.iterations - 1)
        return float(rate.numpy())

    def _write(self, row: Row) -> None:
        for reader in self._readers:
            reader.write(row)


def check_evaluated(row: Row, examples: int) -> None:
    """Checks that an evaluation saw each image once.

    Raises:
      RuntimeError: if it did not, which is a bug of ours and never a matter of the data.
    """
    seen = row["examples"] + row["skipped"]
    if seen != examples:
        raise RuntimeError(f"evaluation saw {seen:.0f} images, but there are {examples}")


def _sums(logs: dict[str, tf.Tensor]) -> dict[str, float]:
    """Turns means back into sums, so that their differences can be taken."""
    values = {name: float(value) for name, value in logs.items()}
    means = {name: values[name] * values["examples"] for name in ("loss", "top1", "top5")}
    return {**values, **means}


class JsonLines:
    """Appends rows to ``metrics.jsonl``; rows of steps that will be done again are dropped.

    Args:
      model_dir: the run's directory.
      step: the step from which the run goes on.
    """

    def __init__(self, model_dir: str, step: int) -> None:
        kept = [row for row in read_rows(model_dir) if row["step"] <= step]
        self._file = LineFile(to_path(model_dir, METRICS_FILE), map(json.dumps, kept))

    def write(self, row: Row) -> None:
        """Appends a row, whole."""
        self._file.add(json.dumps(row))

    def flush(self) -> None:
        """Writes the rows that are still in memory."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_rows(model_dir: str) -> list[Row]:
    """Returns the rows of ``metrics.jsonl`` before the first that is damaged, as by a kill."""
    path = to_path(model_dir, METRICS_FILE)
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class ProgressBar:
    """A bar over the run's steps with loss, accuracy, images/s, images/s per device and ETA."""

    def __init__(self, step: int, total_steps: int, devices: int) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            # A file or a pipe gets a line now and then, not a bar redrawn each time.
            mininterval=0.5 if os.isatty(2) else 10,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} ETA {remaining}{postfix}",
        )
        self._devices = devices

    def write(self, row: Row) -> None:
        """Moves the bar to the row's step; says how an evaluation went."""
        if row["kind"] == "validation":
            self._bar.write(
                f"epoch {row['epoch']:.4g}: validation top-1 {row['top1']:.2%}, top-5 "
                f"{row['top5']:.2%}, loss {row['loss']:.4f} on {row['examples']:.0f} images",
                file=sys.stderr,
            )
            return
        speed = row["images_per_second"]
        self._bar.set_postfix_str(
            f"epoch {row['epoch']:.2f}, loss {row['loss']:.4f}, top-1 {row['top1']:.1%}, "
            f"{speed:.0f} images/s, {speed / self._devices:.0f} per device",
            refresh=False,
        )
        self._bar.update(row["step"] - self._bar.n)

    def close(self) -> None:
        """Leaves the bar where it is."""
        self._bar.close()


class TensorBoard:
    """Writes rows as TensorBoard scalars, by the step, and pictures and texts beside them.

    All goes through one writer of each kind: TensorBoard may never look again at a file that is
    not the newest of its folder.
    """

    def __init__(self, model_dir: str) -> None:
        self._writers = {
            kind: tf.summary.create_file_writer(
                tensorboard_folder(model_dir, kind), max_queue=_SCALARS_AT_ONCE
            )
            for kind in ("train", "validation")
        }
        self._pause = seconds_between_writes(to_path(model_dir))
        self._written = time.monotonic()
        self._waiting: list[Row] = []

    def write(self, row: Row) -> None:
        """Writes a row's numbers, to a bucket only after some time, or with :meth:`flush`."""
        self._waiting.append(row)
        if time.monotonic() - self._written >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes what is waiting."""
        for kind, writer in self._writers.items():
            rows = [row for row in self._waiting if row["kind"] == kind]
            if rows:
                with writer.as_default():  # whose end writes to the file
                    for row in rows:
                        _write_scalars(row)
        self._waiting = []
        self._written = time.monotonic()

    def show_picture(self, kind: str, step: int, name: str, png: bytes) -> None:
        """Writes a picture, a PNG file, to what is told of ``train`` or ``validation``."""
        with self._writers[kind].as_default(step=step):
            tf.summary.image(name, tf.io.decode_png(png, 3)[tf.newaxis])
        self._writers[kind].flush()

    def show_text(self, kind: str, step: int, name: str, markdown: str) -> None:
        """Writes a text to what is told of ``train`` or ``validation``."""
        with self._writers[kind].as_default(step=step):
            tf.summary.text(name, markdown)
        self._writers[kind].flush()

    def close(self) -> None:
        """Writes what is waiting."""
        self.flush()
        for writer in self._writers.values():
            writer.close()


def _write_scalars(row: Row) -> None:
    for name, value in row.items():
        if name not in ("kind", "step"):
            tf.summary.scalar(name, value, step=row["step"])


def tensorboard_folder(model_dir: str, kind: str) -> str:
    """Returns where TensorBoard finds what a run tells of ``train`` or ``validation``."""
    return str(to_path(model_dir, "tensorboard", kind))
