"""The learning-rate schedule that a configuration describes."""

from __future__ import annotations

import math

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text
from imagenet_fast.optimizers import (
    CosineDecay,
    GradualWarmup,
    PiecewiseLinear,
    PolynomialDecay,
    StepDecay,
)
from imagenet_fast.optimizers.options import ScheduleOptions
from imagenet_fast.optimizers.schedules import Schedule
from imagenet_fast.training.schedule_steps import (
    decay_boundaries,
    decay_steps,
    total_steps,
    warmup_steps,
)


def build_schedule(options: ScheduleOptions, steps_per_epoch: int) -> Schedule:
    """Returns the learning-rate schedule by step.

    Step decay, and warmup from the reference learning rate: Goyal et al. 2017. Polynomial and
    cosine decay last :func:`~imagenet_fast.training.schedule_steps.decay_steps`.

    ``piecewise_linear`` counts steps from 1, as Page does: no update is lost to a first knot of 0,
    and the update that ends epoch 5 has the learning rate of a knot there.

    Raises:
      UserError: if the run has no steps, or is shorter than its warmup or its knots.
    """
    total = total_steps(options, steps_per_epoch)
    warmup = warmup_steps(options, steps_per_epoch)
    if warmup > total:
        raise UserError(
            f"warmup {options.warmup} ({warmup:g} steps) is longer than the run, duration "
            f"{options.duration} ({total} steps)"
        )
    schedule = _after_warmup(options, steps_per_epoch, total, warmup)
    first = options.warmup_first_rate
    if not warmup or first is None:
        return schedule
    return GradualWarmup(schedule, first, warmup)


def warn_of_short_run(options: ScheduleOptions, steps_per_epoch: int) -> None:
    """Warns of a warmup that takes most of the run, and of decays after its end."""
    total = total_steps(options, steps_per_epoch)
    warmup = warmup_steps(options, steps_per_epoch)
    if warmup > total / 2:
        warn_once(
            f"the warmup takes {warmup / total:.0%} of the run: warmup is {options.warmup}, "
            f"duration {options.duration}"
        )
    if options.schedule != "steps":
        return
    decays = decay_boundaries(options, steps_per_epoch)
    late = sum(step >= total for step in decays)
    if late:
        warn_once(
            f"{late} of {len(decays)} decays of the learning rate come after the end of the run: "
            f"decay_at is {option_text(options.decay_at)}, duration {options.duration}"
        )


def _after_warmup(
    options: ScheduleOptions, steps_per_epoch: int, total: int, warmup: float
) -> Schedule:
    """Returns the schedule without its warmup."""
    peak = options.scaled_learning_rate
    if options.schedule == "constant":
        return StepDecay(peak)
    if options.schedule == "steps":
        return StepDecay(peak, decay_boundaries(options, steps_per_epoch), options.decay_factor)
    if options.schedule == "piecewise_linear":
        return _piecewise_linear(options, steps_per_epoch, total)
    first, steps = math.floor(warmup), decay_steps(options, steps_per_epoch)
    if options.schedule == "cosine":
        return CosineDecay(peak, options.end_learning_rate, steps, first)
    return PolynomialDecay(peak, options.end_learning_rate, steps, first, options.decay_power)


def _piecewise_linear(
    options: ScheduleOptions, steps_per_epoch: int, total: int
) -> PiecewiseLinear:
    knots = [at.steps(steps_per_epoch, options.batch_size) for at in options.knots_at]
    if knots[-1] > total:
        raise UserError(
            f"knots_at goes to {options.knots_at[-1]} ({knots[-1]} steps), but the run, duration "
            f"{options.duration}, has {total} steps: give --knots_at with it"
        )
    values = [fraction * options.scaled_learning_rate for fraction in options.knots]
    return PiecewiseLinear([knot - 1 for knot in knots], values)
