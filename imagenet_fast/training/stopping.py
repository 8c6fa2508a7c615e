"""Ends a run at its target accuracy, or when its accuracy no longer improves."""

from __future__ import annotations

from typing import Any

import tf_keras as keras

from imagenet_fast.training.options import RunOptions
from imagenet_fast.training.recorder import Recorder


class StopTraining(keras.callbacks.Callback):
    """Stops training after an evaluation, by ``stop_at_accuracy`` or ``early_stopping``.

    All workers have the same metrics, and so stop after the same evaluation.

    Args:
      options: of the run.
      recorder: gives the evaluations; called before this.
    """

    def __init__(self, options: RunOptions, recorder: Recorder) -> None:
        super().__init__()
        self._options = options
        self._recorder = recorder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Checks the evaluations."""
        if self._recorder.evaluations.reason_to_stop(self._options):
            self.model.stop_training = True
