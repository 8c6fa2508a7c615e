"""The progress of a run on standard error: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from imagenet_fast.training.logs.logger import Logger, Row
from imagenet_fast.training.options import metric_text

# Least time between two lines in a file or pipe.
_LINE_SECONDS = 30.0


class ProgressBar(Logger):
    """Shows step, loss, accuracy, images/s, images/s per device and ETA of a run.

    The ETA includes evaluations and checkpoints, but no compilation.

    Args:
      step: weight updates before this process.
      total_steps: weight updates of the run.
      batch_size: images in a weight update.
      devices: number of devices.
      classes: number of classes; with at most 5, top-5 accuracy says nothing and is left out.
      now: gives the time in seconds.
    """

    def __init__(
        self,
        step: int,
        total_steps: int,
        *,
        batch_size: int,
        devices: int,
        classes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._batch_size = total_steps, batch_size
        self._devices, self._classes, self._now = devices, classes, now
        self._first: tuple[int, float] | None = None  # step and time of the first row
        self._last_line = float("-inf")
        self._unread: BrokenPipeError | None = None
        self._bar = None
        if os.isatty(2):
            self._bar = tqdm(
                total=total_steps,
                initial=step,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def before_steps(self, step: int) -> None:
        """Ends a run whose lines nobody reads any more.

        Ctrl-C ends the reader, such as ``tee``, too, and the run saves a checkpoint first.

        Raises:
          BrokenPipeError: if there was a line that could not be written.
        """
        if self._unread is not None:
            raise self._unread

    def write(self, row: Row) -> None:
        """Moves the bar to the row's step, or prints an evaluation's result."""
        if row["kind"] == "validation":
            names = ["top1", "top5"] if self._classes > 5 else ["top1"]
            if "map" in row:
                names = ["map", "f1_micro", "f1_macro"]
            metrics = "".join(f"{metric_text(row, name)}, " for name in names)
            self._print(
                f"epoch {row['epoch']:.4g}: validation {metrics}"
                f"loss {row['loss']:.4f} on {row['examples']:.0f} images"
            )
            return
        step, speed = row["step"], row["images_per_second"]
        top1 = f"top-1 {row['top1']:.1%}, " if "top1" in row else ""
        text = (
            f"ETA {self._eta(step, speed)}, epoch {row['epoch']:.2f}, loss {row['loss']:.4f}, "
            f"{top1}{speed:.0f} images/s"
        )
        if self._devices > 1:
            text += f", {speed / self._devices:.0f} per device"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._now() - self._last_line >= _LINE_SECONDS or step == self._total_steps:
            self._last_line = self._now()
            self._print(f"{step / self._total_steps:4.0%} {step}/{self._total_steps} steps, {text}")

    def close(self) -> None:
        """Stops the bar and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _eta(self, step: int, speed: float) -> str:
        """Returns the time left: by the speed of the first row, then by the time since it."""
        if self._first is None:
            self._first = step, self._now()
            seconds = self._batch_size / speed if speed else None
        else:
            first, since = self._first
            seconds = (self._now() - since) / (step - first) if step > first else None
        if seconds is None:
            return "?"
        return tqdm.format_interval(seconds * (self._total_steps - step))

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            try:
                print(line, file=sys.stderr, flush=True)
            except BrokenPipeError as error:
                self._unread = error
