"""The callback that saves checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

from imagenet_fast.training.callback import TensorsCallback
from imagenet_fast.training.checkpoint import Checkpoints
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.metrics_file import JsonLines
from imagenet_fast.training.mlperf_log import MLPerfLog
from imagenet_fast.training.recorder import Recorder
from imagenet_fast.training.tensorboard import TensorBoard

Log = Union[JsonLines, TensorBoard, MLPerfLog]


class Saver(TensorsCallback):
    """Saves a checkpoint when one is due, and of the best evaluation, after that of the same step.

    Args:
      checkpoints: writes them.
      clock: of the run; paused meanwhile.
      recorder: gives the step; its unread metrics are read before a checkpoint.
      logs: flushed before a checkpoint, so that a resumed run can continue them.
      every: steps between two checkpoints.
      total_steps: steps of the run; the last one is always saved.
      data: values that identify the training data, saved in the checkpoint.
      keep_best: whether to save a checkpoint of the best evaluation, too.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        clock: Clock,
        recorder: Recorder,
        logs: Sequence[Log],
        *,
        every: int,
        total_steps: int,
        data: Mapping[str, Any],
        keep_best: bool,
    ) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._clock = clock
        self._recorder = recorder
        self._logs = logs
        self._every = every
        self._total_steps = total_steps
        self._data = data
        self._keep_best = keep_best
        self._saved = recorder.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves between evaluations, which come after Keras' epochs."""
        if batch + 1 < self.params["steps"]:
            self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after an evaluation."""
        step = self._recorder.step
        if self._keep_best and self._recorder.evaluations.best.get("step") == step:
            with self._clock.paused():
                self._checkpoints.save_best(step, self._state())
        self._save_if_due()

    def on_train_end(self, logs: Any = None) -> None:
        """Saves the end of the run, but not of other calls of ``fit``, which is arbitrary."""
        if self._recorder.step == self._total_steps or self.model.stop_training:
            self._save()

    def _save_if_due(self) -> None:
        if self._recorder.step % self._every == 0:
            self._save()

    def _save(self) -> None:
        step = self._recorder.step
        if step == self._saved:
            return
        self._recorder.read()
        with self._clock.paused():
            for log in self._logs:
                log.flush()
            self._checkpoints.save(step, self._state())
        self._saved = step

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._recorder.step,
            **self._data,
            "clock": self._clock.state(),
            **self._recorder.evaluations.state(),
        }
