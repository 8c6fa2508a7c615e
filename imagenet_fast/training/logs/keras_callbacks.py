"""Calls the user's Keras callbacks as ``fit`` would."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.training.logs.logger import Logger, Row
from imagenet_fast.training.step.training_step import TrainingStep

# They set the optimizer's learning rate, which is a schedule here.
_SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


class KerasCallbacks(Logger):
    """Calls Keras callbacks, in the order of ``fit``.

    Their epochs last from one evaluation to the next, also where a run resumes between two. A batch
    is a call of several steps, as with Keras' ``steps_per_execution``: the hook before it gets the
    number of its first step within the epoch, the one after it that of its last.

    An epoch has ``every`` steps, the run ``last_step``. A callback that sets the model's
    ``stop_training`` ends the run.

    Raises:
      UserError: if a callback would have no effect, or one that the checkpoints lack.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: TrainingStep,
        every: int,
        last_step: int,
    ) -> None:
        self._model, self._every = model, every
        self._epoch: int | None = None  # the one that has begun
        self._logs: Row = {}
        for callback in callbacks:
            if isinstance(callback, _SET_RATES):
                raise UserError(
                    f"{type(callback).__name__} would have no effect: the learning rate follows "
                    "the run's schedule, warmup and decay_at"
                )
            if getattr(callback, "restore_best_weights", False):
                raise UserError(
                    "EarlyStopping's restore_best_weights comes too late for the checkpoints: "
                    "leave it out, and give --keep_best"
                )
        self._list = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            model=model,
            epochs=-(-last_step // every),
            steps=every,
            verbose=0,
        )

    def before_training(self) -> None:
        """Begins training."""
        self._list.on_train_begin()

    def before_steps(self, step: int) -> None:
        """Begins an epoch, if the last one has ended, and a batch."""
        if self._epoch is None:
            self._epoch = step // self._every
            self._list.on_epoch_begin(self._epoch)
        self._list.on_train_batch_begin(step % self._every)

    def after_steps(self, step: int) -> None:
        """Ends a batch."""
        self._logs = self._model.metric_sums.results()
        self._list.on_train_batch_end((step - 1) % self._every, self._logs)

    def before_evaluation(self, step: int) -> None:
        """Begins an evaluation."""
        self._list.on_test_begin()

    def before_evaluation_steps(self, step: int) -> None:
        """Begins a batch of an evaluation."""
        self._list.on_test_batch_begin(step)

    def after_evaluation_steps(self, step: int) -> None:
        """Ends a batch of an evaluation."""
        self._list.on_test_batch_end(step - 1, self._model.metric_sums.results())

    def after_evaluation(self) -> None:
        """Ends an evaluation."""
        logs = self._model.metric_sums.results()
        self._list.on_test_end(logs)
        self._logs |= {f"val_{name}": value for name, value in logs.items()}

    def after_epoch(self) -> None:
        """Ends an epoch."""
        self._list.on_epoch_end(self._epoch, self._logs)
        self._epoch = None

    def after_training(self) -> None:
        """Ends training."""
        self._list.on_train_end(self._logs)
