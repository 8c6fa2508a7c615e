"""TensorFlow's profiler at chosen steps of a run."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.training.logs.logger import Logger


class Profiler(Logger):
    """Profiles steps, the first one being 1, for TensorBoard, in ``plugins/profile`` of its folder.

    A run that resumes within the range profiles the rest of it.
    """

    def __init__(self, folder: str, first: int, last: int) -> None:
        self._folder = folder
        self._first, self._last = first, last
        self._recording = False

    def before_steps(self, step: int) -> None:
        """Starts before the first step."""
        if not self._recording and self._first <= step + 1 <= self._last:
            tf.profiler.experimental.start(self._folder)
            self._recording = True

    def after_steps(self, step: int) -> None:
        """Stops after the last step."""
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Writes the profile, if the run has ended before the last step."""
        if self._recording:
            self._recording = False
            tf.profiler.experimental.stop()
