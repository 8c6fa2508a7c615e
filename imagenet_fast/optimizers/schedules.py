"""Learning rates as functions of the step, exact at their boundaries.

Step 0 is the first weight update. Rates are float32 scalars, each computed from its step alone, so
that no rounding adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from tf_keras.optimizers.schedules import LearningRateSchedule as Schedule


@keras.saving.register_keras_serializable("imagenet_fast")
class StepDecay(Schedule):
    """Multiplies a learning rate by a factor at some steps (Goyal et al. 2017: 1/10 at 30, 60, 80).

    Args:
      rate: the learning rate before the first of them.
      boundaries: the first step of each lower rate, in order; none: the learning rate is constant.
      factor: what the learning rate is multiplied by at each.
    """

    def __init__(self, rate: float, boundaries: Sequence[int] = (), factor: float = 0.1) -> None:
        super().__init__()
        self.rate = rate
        self.boundaries = [int(boundary) for boundary in boundaries]
        self.factor = factor

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        rates = [self.rate * self.factor**i for i in range(len(self.boundaries) + 1)]
        passed = tf.cast(step, tf.int64) >= tf.constant(self.boundaries, tf.int64)
        return tf.gather(tf.constant(rates, tf.float32), tf.reduce_sum(tf.cast(passed, tf.int32)))

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {"rate": self.rate, "boundaries": self.boundaries, "factor": self.factor}


class _Decay(Schedule):
    """Goes from one rate to another; subclasses say along which curve.

    Args:
      rate: the learning rate up to ``first_step``.
      end: the learning rate from ``first_step + steps`` on.
      steps: the length of the decay, positive.
      first_step: where it begins.

    Raises:
      ValueError: if ``steps`` is not positive.
    """

    def __init__(self, rate: float, end: float, steps: int, first_step: int = 0) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps is {steps}, but must be positive")
        self.rate = rate
        self.end = end
        self.steps = int(steps)
        self.first_step = int(first_step)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        # Counted from the end in whole numbers: 1 - progress would lose digits where it is small.
        steps_left = self.first_step + self.steps - tf.cast(step, tf.int64)
        left = _share(tf.maximum(steps_left, 0), self.steps)
        weight = self._curve(left)
        # Not end + (rate - end) * weight, which need not be the learning rate where the weight is
        # 1.
        return self.rate * weight + self.end * (1.0 - weight)

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        """Returns the weight of ``rate``, float32: 1 at ``left == 1``, 0 at ``left == 0``."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {
            "rate": self.rate,
            "end": self.end,
            "steps": self.steps,
            "first_step": self.first_step,
        }


@keras.saving.register_keras_serializable("imagenet_fast")
class PolynomialDecay(_Decay):
    """Goes from one rate to another like a power of the fraction of the steps that is left.

    ``rate(step) = (rate - end) * (1 - (step - first_step) / steps) ** power + end``. Large-batch
    recipes use power 2: You et al. 2017 from step 0 over the whole run, with end 0; Google's and
    MLPerf's reference code after a warmup of ``first_step`` steps, with end 1e-4 and over one step
    more than the run has left.

    Args:
      rate: the learning rate up to ``first_step``.
      end: the learning rate from ``first_step + steps`` on.
      steps: the length of the decay, positive.
      first_step: where it begins.
      power: see above.

    Raises:
      ValueError: if ``steps`` is not positive.
    """

    def __init__(
        self, rate: float, end: float, steps: int, first_step: int = 0, power: float = 2.0
    ) -> None:
        super().__init__(rate, end, steps, first_step)
        self.power = power

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        return left**self.power

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "power": self.power}


@keras.saving.register_keras_serializable("imagenet_fast")
class CosineDecay(_Decay):
    """Goes from one rate to another along half a period of a cosine (Loshchilov & Hutter 2017).

    ``rate(step) = end + (rate - end) * (1 + cos(pi * (step - first_step) / steps)) / 2``.

    Args:
      rate: the learning rate up to ``first_step``.
      end: the learning rate from ``first_step + steps`` on.
      steps: the length of the decay, positive.
      first_step: where it begins.

    Raises:
      ValueError: if ``steps`` is not positive.
    """

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        # (1 + cos(pi * progress)) / 2, without its loss of digits near the end.
        return tf.sin(math.pi / 2 * left) ** 2


@keras.saving.register_keras_serializable("imagenet_fast")
class PiecewiseLinear(Schedule):
    """Goes through knots, by the same amount each step between two (Page 2019).

    Args:
      steps: of the knots, in order; one before step 0 is where the first line would come from. Of
        knots at the same step the last one counts there: the learning rate jumps.
      rates: at the knots, which are also those before the first and after the last.

    Raises:
      ValueError: if there are no knots, or not as many rates, or they are not in order.
    """

    def __init__(self, steps: Sequence[int], rates: Sequence[float]) -> None:
        super().__init__()
        if not steps or len(steps) != len(rates):
            raise ValueError(f"there are {len(steps)} steps of knots and {len(rates)} rates")
        if list(steps) != sorted(steps):
            raise ValueError(f"the steps of the knots are not in order: {list(steps)}")
        self.steps = [int(step) for step in steps]
        self.rates = list(rates)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        knots = tf.constant(self.steps, tf.int64)
        rates = tf.constant(self.rates, tf.float32)
        step = tf.clip_by_value(tf.cast(step, tf.int64), self.steps[0], self.steps[-1])
        # The last knot that is not after the step, and the next: itself, at the last one.
        below = tf.reduce_sum(tf.cast(step >= knots, tf.int32)) - 1
        above = tf.minimum(below + 1, len(self.steps) - 1)
        length = tf.maximum(tf.gather(knots, above) - tf.gather(knots, below), 1)
        weight = _share(step - tf.gather(knots, below), length)
        return tf.gather(rates, below) * (1.0 - weight) + tf.gather(rates, above) * weight

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {"steps": self.steps, "rates": self.rates}


class _Warmup(Schedule):
    """Has rates of its own before another schedule's.

    Args:
      schedule: the learning rates from step ``steps`` on.
      start: the learning rate of step 0.
      steps: the length of the warmup. It need not be a whole number: Google's recipes warm up for
        a number of examples. The last step below it is then still warmup.

    Raises:
      ValueError: if ``schedule`` is none.
    """

    def __init__(self, schedule: Schedule, start: float, steps: float) -> None:
        super().__init__()
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule is {schedule!r}, but must be a LearningRateSchedule")
        self.schedule = schedule
        self.start = start
        self.steps = steps

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        step = tf.cast(step, tf.int64)
        return tf.where(step < math.ceil(self.steps), self._rate(step), self.schedule(step))

    def _rate(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of a step of the warmup, int64."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "start": self.start,
            "steps": self.steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Warmup:
        """Makes a schedule from what ``get_config`` returned."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["start"], config["steps"])


@keras.saving.register_keras_serializable("imagenet_fast")
class GradualWarmup(_Warmup):
    """Goes up from one rate to another schedule's, by the same amount each step.

    Goyal et al. 2017, section 2.2: from the learning rate of one server, not from 0, so that
    ``rate(0) == start`` and ``rate(steps) == schedule(steps)``. TensorFlow's own TPU recipes and
    MLPerf's start at 0.

    Args:
      schedule: the learning rates from step ``steps`` on.
      start: the learning rate of step 0.
      steps: the length of the warmup. It need not be a whole number: Google's recipes warm up for
        a number of examples. The last step below it is then still warmup, on the way to the
        learning rate that the schedule has there.
    """

    def _rate(self, step: tf.Tensor) -> tf.Tensor:
        target = self.schedule(math.floor(self.steps))
        # Scaled steps, not a sum of increments, so that no rounding adds up.
        return self.start + (target - self.start) * _share(step, max(self.steps, 1))


@keras.saving.register_keras_serializable("imagenet_fast")
class ConstantWarmup(_Warmup):
    """Keeps a lower rate at first, then takes another schedule's (Goyal et al. 2017, section 2.2).

    The jump at its end is what gradual warmup is there to avoid: the paper has it to compare.

    Args:
      schedule: the learning rates from step ``steps`` on.
      start: the learning rate before.
      steps: the length of the warmup; see ``GradualWarmup``.
    """

    def _rate(self, step: tf.Tensor) -> tf.Tensor:
        return tf.constant(self.start, tf.float32)


def _share(part: tf.Tensor, whole: tf.Tensor | float) -> tf.Tensor:
    """Returns ``part / whole`` as float32, at most 1, and exactly 1 where the part is the whole."""
    part, whole = tf.cast(part, tf.float32), tf.cast(whole, tf.float32)
    # A graph multiplies by a constant's inverse instead, with which part / part can miss 1.
    return tf.where(part >= whole, 1.0, part / whole)
