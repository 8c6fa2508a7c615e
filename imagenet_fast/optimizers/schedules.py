"""Learning rates as functions of the step, exact at their boundaries.

Step 0 is the first weight update. Rates are float32 scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("imagenet_fast")
class StepDecay(Schedule):
    """Multiplies a rate by a factor at each of some steps (Goyal et al. 2017: x1/10 at 30, 60, 80).

    Args:
      rate: the rate before the first of them.
      boundaries: the first step of each lower rate, in order.
      factor: what the rate is multiplied by at each.
    """

    def __init__(self, rate: float, boundaries: Sequence[int], factor: float) -> None:
        super().__init__()
        self.rate = rate
        self.boundaries = [int(boundary) for boundary in boundaries]
        self.factor = factor

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate of a step."""
        rates = [self.rate * self.factor**i for i in range(len(self.boundaries) + 1)]
        passed = tf.cast(step, tf.int64) >= tf.constant(self.boundaries, tf.int64)
        return tf.gather(tf.constant(rates, tf.float32), tf.reduce_sum(tf.cast(passed, tf.int32)))

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {"rate": self.rate, "boundaries": self.boundaries, "factor": self.factor}


@keras.saving.register_keras_serializable("imagenet_fast")
class GradualWarmup(Schedule):
    """Goes up from one rate to another schedule's, by the same amount each step.

    Goyal et al. 2017, section 2.2: from the rate of one server, not from 0, so that
    ``rate(0) == start`` and ``rate(steps) == schedule(steps)``. TensorFlow's own TPU recipes start
    at 0.

    Args:
      schedule: the rates from step ``steps`` on.
      start: the rate of step 0.
      steps: the length of the warmup.
    """

    def __init__(self, schedule: Schedule, start: float, steps: int) -> None:
        super().__init__()
        self.schedule = schedule
        self.start = start
        self.steps = int(steps)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate of a step."""
        step = tf.cast(step, tf.int64)
        # Scaled steps, not a sum of increments, so that no rounding adds up.
        progress = tf.cast(step, tf.float32) / tf.cast(max(self.steps, 1), tf.float32)
        target = self.schedule(self.steps)
        rising = self.start + (target - self.start) * progress
        return tf.where(step < self.steps, rising, self.schedule(step))

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "start": self.start,
            "steps": self.steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GradualWarmup:
        """Makes a schedule from what ``get_config`` returned."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["start"], config["steps"])
