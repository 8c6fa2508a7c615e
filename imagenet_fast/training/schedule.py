"""From a configuration to the learning rate of every step."""

from __future__ import annotations

import math

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.optimizers import (
    ConstantWarmup,
    CosineDecay,
    GradualWarmup,
    PiecewiseLinear,
    PolynomialDecay,
    StepDecay,
)
from imagenet_fast.optimizers.schedules import Schedule


def build_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """Returns the learning rate by the step.

    Decay in steps, and warmup from the reference rate: Goyal et al. 2017. Polynomial and cosine
    decay take :func:`decay_steps`.

    Piecewise linear is Page's: he counts steps from 1, so that no update is lost to a first knot
    of rate 0, and the update that ends epoch 5 has the rate of a knot there.

    Args:
      config: the options of the run.
      steps_per_epoch: weight updates in an epoch.

    Raises:
      UserError: if the run has no steps, or its warmup or its knots last longer than itself.
    """
    total = total_steps(config, steps_per_epoch)
    warmup = warmup_steps(config, steps_per_epoch)
    if warmup > total:
        raise UserError(
            f"warmup {config.warmup} ({warmup:g} steps) is longer than the run, duration "
            f"{config.duration} ({total} steps)"
        )
    schedule = _after_warmup(config, steps_per_epoch, total, warmup)
    first = config.warmup_first_rate
    if not warmup or first is None:
        return schedule
    kind = {"gradual": GradualWarmup, "constant": ConstantWarmup}[config.warmup_kind]
    return kind(schedule, first, warmup)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Returns the weight updates of a run.

    Raises:
      UserError: if there are none.
    """
    total = config.duration.steps(steps_per_epoch, config.batch_size)
    if not total:
        raise UserError(
            f"duration {config.duration} is less than one step of {config.batch_size} images"
        )
    return total


def warmup_steps(config: Config, steps_per_epoch: int) -> float:
    """Returns the length of the warmup in weight updates; 0: there is none.

    A number of examples is not rounded: Google's recipes warm up for 14 epochs of 1,281,167
    images, which are 547.37 updates of 32,768.
    """
    if config.schedule == "piecewise_linear":
        return 0  # its knots have it
    if config.warmup_first_rate is None:
        return 0
    if config.warmup.unit == "examples":
        return config.warmup.exact_steps(steps_per_epoch, config.batch_size)
    return config.warmup.steps(steps_per_epoch, config.batch_size)


def decay_boundaries(config: Config, steps_per_epoch: int) -> list[int]:
    """Returns the steps at which ``schedule=steps`` multiplies the rate."""
    every = config.decay_every.exact_steps(steps_per_epoch, config.batch_size)
    if not every:
        return [at.steps(steps_per_epoch, config.batch_size) for at in config.decay_at]
    total = total_steps(config, steps_per_epoch)
    return [round(number * every) for number in range(1, math.ceil(total / every))]


def decay_steps(config: Config, steps_per_epoch: int) -> int:
    """Returns the steps in which polynomial and cosine decay reach the end rate.

    After a warmup it is one step more than the run has left, as in Google's and MLPerf's reference
    code; without one it is the whole run, as in You et al. 2017.
    """
    total = total_steps(config, steps_per_epoch)
    warmup = warmup_steps(config, steps_per_epoch)
    return total - math.floor(warmup) + 1 if warmup else total


def _after_warmup(config: Config, steps_per_epoch: int, total: int, warmup: float) -> Schedule:
    """Returns the rates from the end of the warmup on."""
    rate = config.scaled_learning_rate
    if config.schedule == "constant":
        return StepDecay(rate)
    if config.schedule == "steps":
        return StepDecay(rate, decay_boundaries(config, steps_per_epoch), config.decay_factor)
    if config.schedule == "piecewise_linear":
        return _piecewise_linear(config, steps_per_epoch, total)
    first, steps = math.floor(warmup), decay_steps(config, steps_per_epoch)
    if config.schedule == "cosine":
        return CosineDecay(rate, config.end_learning_rate, steps, first)
    return PolynomialDecay(rate, config.end_learning_rate, steps, first, config.decay_power)


def _piecewise_linear(config: Config, steps_per_epoch: int, total: int) -> PiecewiseLinear:
    knots = [at.steps(steps_per_epoch, config.batch_size) for at in config.knots_at]
    if knots[-1] > total:
        raise UserError(
            f"knots_at goes to {config.knots_at[-1]} ({knots[-1]} steps), but the run, duration "
            f"{config.duration}, has {total} steps: give --knots_at with it"
        )
    rates = [share * config.scaled_learning_rate for share in config.knots]
    return PiecewiseLinear([knot - 1 for knot in knots], rates)
