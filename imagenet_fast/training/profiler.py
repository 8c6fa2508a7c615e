"""TensorFlow's profiler at chosen steps of a run."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from imagenet_fast.training.callback import TensorsCallback
from imagenet_fast.training.recorder import Recorder


class Profiler(TensorsCallback):
    """Profiles a range of steps for TensorBoard.

    A run that resumes within the range profiles the rest of it.

    Args:
      folder: TensorBoard's; profiles are written to ``plugins/profile`` in it.
      first: the first step to profile; a run's first is step 1.
      last: the last step to profile.
      recorder: gives the step; called before this.
    """

    def __init__(self, folder: str, first: int, last: int, recorder: Recorder) -> None:
        super().__init__()
        self._folder = folder
        self._first, self._last = first, last
        self._recorder = recorder
        self._recording = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts before the first step."""
        if not self._recording and self._first <= self._recorder.step + 1 <= self._last:
            tf.profiler.experimental.start(self._folder)
            self._recording = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops when the devices have finished the last step."""
        if self._recording and self._recorder.step == self._last:
            float(logs["loss"])
            self.close()

    def close(self) -> None:
        """Writes the profile, if the run has ended before the last step."""
        if self._recording:
            self._recording = False
            tf.profiler.experimental.stop()
