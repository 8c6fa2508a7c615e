"""Learning-rate schedules: steps, polynomial, cosine, piecewise linear, and warmup.

Step 0 is the first weight update. Learning rates are float32 scalars, each computed from its step
alone, so rounding errors do not add up, and exact at the boundaries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from tf_keras.optimizers.schedules import LearningRateSchedule as Schedule


@dataclasses.dataclass(eq=False)
class _Schedule(Schedule):
    """A dataclass whose fields are its Keras configuration."""

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class StepDecay(_Schedule):
    """Multiplies a learning rate by a factor at some steps (Goyal et al. 2017: 1/10 at 30, 60, 80).

    Args:
      rate: learning rate before the first of them.
      boundaries: first step of each lower learning rate, in order; none: it is constant.
      factor: of the learning rate at each boundary.
    """

    rate: float
    boundaries: Sequence[int] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        self.boundaries = [int(boundary) for boundary in self.boundaries]

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        rates = [self.rate * self.factor**i for i in range(len(self.boundaries) + 1)]
        passed = tf.cast(step, tf.int64) >= tf.constant(self.boundaries, tf.int64)
        return tf.gather(tf.constant(rates, tf.float32), tf.reduce_sum(tf.cast(passed, tf.int32)))


@dataclasses.dataclass(eq=False)
class _Decay(_Schedule):
    """From one learning rate to another, along the curve of a subclass; its options are theirs."""

    rate: float
    end: float
    steps: int
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}, but must be positive")
        self.steps, self.first_step = int(self.steps), int(self.first_step)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        # Counted from the end in whole numbers: 1 - progress would lose digits where it is small.
        steps_left = self.first_step + self.steps - tf.cast(step, tf.int64)
        weight = self._curve(_fraction(tf.maximum(steps_left, 0), self.steps))
        # Not end + (rate - end) * weight, which need not be rate at weight 1.
        return self.rate * weight + self.end * (1.0 - weight)

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        """Returns the weight of ``rate``, float32: 1 at ``left == 1``, 0 at ``left == 0``."""
        raise NotImplementedError


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class PolynomialDecay(_Decay):
    """From one learning rate to another, by a power of the fraction of the steps that is left.

    ``rate(step) = (rate - end) * (1 - (step - first_step) / steps) ** power + end``. Large-batch
    recipes use power 2: You et al. 2017 from step 0 over the whole run, with end 0; Google's and
    MLPerf's reference code after a warmup of ``first_step`` steps, with end 1e-4, over one step
    more than the run has left.

    Args:
      rate: learning rate up to ``first_step``.
      end: learning rate from ``first_step + steps`` on.
      steps: length of the decay, positive.
      first_step: its start.
      power: see above.

    Raises:
      ValueError: if ``steps`` is not positive.
    """

    power: float = 2.0

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        return left**self.power


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class CosineDecay(_Decay):
    """From one learning rate to another, along half a cosine period (Loshchilov & Hutter 2017).

    ``rate(step) = end + (rate - end) * (1 + cos(pi * (step - first_step) / steps)) / 2``.

    Args:
      rate: learning rate up to ``first_step``.
      end: learning rate from ``first_step + steps`` on.
      steps: length of the decay, positive.
      first_step: its start.

    Raises:
      ValueError: if ``steps`` is not positive.
    """

    def _curve(self, left: tf.Tensor) -> tf.Tensor:
        # (1 + cos(pi * progress)) / 2, without its loss of digits near the end.
        return tf.sin(math.pi / 2 * left) ** 2


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class PiecewiseLinear(_Schedule):
    """Interpolates linearly between knots (Page 2019).

    Args:
      steps: of the knots, in order; the first may be negative. If several knots have the same step,
        the learning rate jumps there, to that of the last of them.
      rates: learning rate at each knot; those of the first and last knot also apply beyond them.

    Raises:
      ValueError: if there are no knots, or not as many rates, or they are not in order.
    """

    steps: Sequence[int]
    rates: Sequence[float]

    def __post_init__(self) -> None:
        if not self.steps or len(self.steps) != len(self.rates):
            raise ValueError(
                f"there are {len(self.steps)} steps of knots, but {len(self.rates)} learning rates"
            )
        if list(self.steps) != sorted(self.steps):
            raise ValueError(f"the steps of the knots are not in order: {list(self.steps)}")
        self.steps = [int(step) for step in self.steps]
        self.rates = list(self.rates)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        knots = tf.constant(self.steps, tf.int64)
        rates = tf.constant(self.rates, tf.float32)
        step = tf.clip_by_value(tf.cast(step, tf.int64), self.steps[0], self.steps[-1])
        # The last knot not after the step, and the next one, if any.
        below = tf.reduce_sum(tf.cast(step >= knots, tf.int32)) - 1
        above = tf.minimum(below + 1, len(self.steps) - 1)
        length = tf.maximum(tf.gather(knots, above) - tf.gather(knots, below), 1)
        weight = _fraction(step - tf.gather(knots, below), length)
        return tf.gather(rates, below) * (1.0 - weight) + tf.gather(rates, above) * weight


@dataclasses.dataclass(eq=False)
class _Around(_Schedule):
    """Changes another schedule; its options are those of subclasses."""

    schedule: Schedule

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule is {self.schedule!r}, but must be a LearningRateSchedule")

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {**super().get_config(), "schedule": schedule}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Around:
        """Makes a schedule from what ``get_config`` returned."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(**{**config, "schedule": schedule})


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class EveryNthStep(_Around):
    """The learning rates of an optimizer that updates in every n-th step of another's schedule.

    Args:
      schedule: learning rates by step.
      every: steps from an update to the next; the first is in step 0.

    Raises:
      ValueError: if ``schedule`` is not a schedule.
    """

    every: int

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of an update, counted from 0."""
        return self.schedule(self.every * tf.cast(step, tf.int64))


@dataclasses.dataclass(eq=False)
class _Warmup(_Around):
    """Learning rates before those of another schedule; its options are those of subclasses."""

    start: float
    steps: float

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the learning rate of a step."""
        step = tf.cast(step, tf.int64)
        return tf.where(step < math.ceil(self.steps), self._warm(step), self.schedule(step))

    def _warm(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of a step of the warmup, int64."""
        raise NotImplementedError


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class GradualWarmup(_Warmup):
    """Linear warmup from one learning rate to that of another schedule.

    Goyal et al. 2017, section 2.2: from the learning rate of one server, not from 0, so
    ``rate(0) == start`` and ``rate(steps) == schedule(steps)``. TensorFlow's TPU recipes and
    MLPerf's start at 0.

    Args:
      schedule: learning rates from step ``steps`` on.
      start: learning rate of step 0.
      steps: length of the warmup. It need not be a whole number: Google's recipes warm up for a
        number of examples. The last step below it is then still warmup, on the way to the
        schedule's learning rate at that step.

    Raises:
      ValueError: if ``schedule`` is not a schedule.
    """

    def _warm(self, step: tf.Tensor) -> tf.Tensor:
        target = self.schedule(math.floor(self.steps))
        # Scaled steps, not accumulated increments, so rounding errors do not add up.
        return self.start + (target - self.start) * _fraction(step, max(self.steps, 1))


@keras.saving.register_keras_serializable("imagenet_fast")
@dataclasses.dataclass(eq=False)
class ConstantWarmup(_Warmup):
    """A constant learning rate before another schedule (Goyal et al. 2017, section 2.2).

    The paper compares gradual warmup with it, which avoids the jump at its end.

    Args:
      schedule: learning rates from step ``steps`` on.
      start: learning rate before.
      steps: length of the warmup; see ``GradualWarmup``.

    Raises:
      ValueError: if ``schedule`` is not a schedule.
    """

    def _warm(self, step: tf.Tensor) -> tf.Tensor:
        return tf.constant(self.start, tf.float32)


def _fraction(part: tf.Tensor, whole: tf.Tensor | float) -> tf.Tensor:
    """Returns ``part / whole`` as float32, at most 1, and exactly 1 if they are equal."""
    part, whole = tf.cast(part, tf.float32), tf.cast(whole, tf.float32)
    # Graphs multiply by a constant's inverse instead, which may give part / part != 1.
    return tf.where(part >= whole, 1.0, part / whole)
