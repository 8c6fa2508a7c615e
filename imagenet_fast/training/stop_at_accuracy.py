"""Ends a run at its target accuracy."""

from __future__ import annotations

from typing import Any

import tf_keras as keras

from imagenet_fast.training.options import RunOptions
from imagenet_fast.training.recorder import Recorder


class StopAtAccuracy(keras.callbacks.Callback):
    """Stops training after an evaluation that reaches ``stop_at_accuracy``.

    Args:
      options: of the run.
      recorder: gives the last evaluation; called before this.
    """

    def __init__(self, options: RunOptions, recorder: Recorder) -> None:
        super().__init__()
        self._options = options
        self._recorder = recorder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Checks the last evaluation."""
        if self._options.reaches_target(self._recorder.validation.get("top1")):
            self.model.stop_training = True
