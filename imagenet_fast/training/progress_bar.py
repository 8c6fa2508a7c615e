"""The progress bar of a run."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm

from imagenet_fast.training.metrics_file import Row


class ProgressBar:
    """A bar over the run's steps with loss, accuracy, images/s, images/s per device and ETA."""

    def __init__(self, step: int, total_steps: int, devices: int) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            # A file or pipe gets a line every 10 s, not a bar that is redrawn.
            mininterval=0.5 if os.isatty(2) else 10,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} ETA {remaining}{postfix}",
        )
        self._devices = devices

    def write(self, row: Row) -> None:
        """Moves the bar to the row's step, or prints an evaluation's result."""
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
        """Stops the bar and leaves it on the screen."""
        self._bar.close()
