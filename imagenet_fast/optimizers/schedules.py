"""Learning-rate schedules: steps, polynomial, cosine, piecewise linear, and warmup.

Step 0 is the first weight update. Learning rates are float32 scalars, each computed from its step
alone, so rounding errors do not add up, and exact at the boundaries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from imagenet_fast.base.keras_2 import ops

Tensor = Any


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

    def __call__(self, step: Tensor | int) -> Tensor:
        """Returns the learning rate of a step."""
        rates = [self.rate * self.factor**i for i in range(len(self.boundaries) + 1)]
        return ops.take(_floats(rates), _number_passed(self.boundaries, step))


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

    def __call__(self, step: Tensor | int) -> Tensor:
        """Returns the learning rate of a step."""
        # Counted from the end in whole numbers: 1 - progress would lose digits where it is small.
        steps_left = self.first_step + self.steps - _whole(step)
        weight = self._curve(_fraction(ops.maximum(steps_left, 0), self.steps))
        # Not end + (rate - end) * weight, which need not be rate at weight 1.
        return self.rate * weight + self.end * (1.0 - weight)

    def _curve(self, left: Tensor) -> Tensor:
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

    def _curve(self, left: Tensor) -> Tensor:
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

    def _curve(self, left: Tensor) -> Tensor:
        # (1 + cos(pi * progress)) / 2, without its loss of digits near the end.
        return ops.sin(math.pi / 2 * left) ** 2


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

    def __call__(self, step: Tensor | int) -> Tensor:
        """Returns the learning rate of a step."""
        knots, rates = _whole(self.steps), _floats(self.rates)
        step = ops.clip(_whole(step), self.steps[0], self.steps[-1])
        # The last knot not after the step, and the next one, if any.
        below = _number_passed(self.steps, step) - 1
        above = ops.minimum(below + 1, len(self.steps) - 1)
        start = ops.take(knots, below)
        weight = _fraction(step - start, ops.maximum(ops.take(knots, above) - start, 1))
        return ops.take(rates, below) * (1.0 - weight) + ops.take(rates, above) * weight


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

    def __call__(self, step: Tensor | int) -> Tensor:
        """Returns the learning rate of an update, counted from 0."""
        return self.schedule(self.every * _whole(step))


@dataclasses.dataclass(eq=False)
class _Warmup(_Around):
    """Learning rates before those of another schedule; its options are those of subclasses."""

    start: float
    steps: float

    def __call__(self, step: Tensor | int) -> Tensor:
        """Returns the learning rate of a step."""
        step = _whole(step)
        return ops.where(step < math.ceil(self.steps), self._warm(step), self.schedule(step))

    def _warm(self, step: Tensor) -> Tensor:
        """Returns the learning rate of a step of the warmup, int32."""
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

    def _warm(self, step: Tensor) -> Tensor:
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

    def _warm(self, step: Tensor) -> Tensor:
        return _floats(self.start)


def _number_passed(boundaries: Sequence[int], step: Tensor | int) -> Tensor:
    """Returns how many of the boundaries are not after the step, int32."""
    return ops.sum(ops.cast(_whole(step) >= _whole(boundaries), "int32"))


def _fraction(part: Tensor, whole: Tensor | float) -> Tensor:
    """Returns ``part / whole`` as float32, at most 1, and exactly 1 if they are equal."""
    part, whole = ops.cast(part, "float32"), _floats(whole)
    # Graphs multiply by a constant's inverse instead, which may give part / part != 1.
    return ops.where(part >= whole, 1.0, part / whole)


def _whole(steps: Tensor | int | Sequence[int]) -> Tensor:
    # Not int64, which JAX lacks unless asked.
    return ops.cast(ops.convert_to_tensor(steps), "int32")


def _floats(values: Tensor | float | Sequence[float]) -> Tensor:
    return ops.cast(ops.convert_to_tensor(values), "float32")
