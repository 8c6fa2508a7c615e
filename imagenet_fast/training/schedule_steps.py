"""Numbers of steps that a schedule's options describe: of the run, its warmup and its decays."""

from __future__ import annotations

import math

from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.options import ScheduleOptions


def total_steps(options: ScheduleOptions, steps_per_epoch: int) -> int:
    """Returns the weight updates of a run.

    Raises:
      UserError: if there are none.
    """
    total = options.duration.steps(steps_per_epoch, options.batch_size)
    if not total:
        raise UserError(
            f"duration {options.duration} is less than one step of {options.batch_size} images"
        )
    return total


def warmup_steps(options: ScheduleOptions, steps_per_epoch: int) -> float:
    """Returns the length of the warmup in weight updates; 0: there is none.

    A number of examples is not rounded: Google's recipes warm up for 14 epochs of 1,281,167
    images, 547.37 updates of 32,768.
    """
    # The knots of piecewise_linear include any warmup.
    if options.schedule == "piecewise_linear" or options.warmup_first_rate is None:
        return 0
    if options.warmup.unit == "examples":
        return options.warmup.exact_steps(steps_per_epoch, options.batch_size)
    return options.warmup.steps(steps_per_epoch, options.batch_size)


def decay_boundaries(options: ScheduleOptions, steps_per_epoch: int) -> list[int]:
    """Returns the steps at which ``schedule=steps`` multiplies the learning rate."""
    every = options.decay_every.exact_steps(steps_per_epoch, options.batch_size)
    if not every:
        return [at.steps(steps_per_epoch, options.batch_size) for at in options.decay_at]
    total = total_steps(options, steps_per_epoch)
    return [round(number * every) for number in range(1, math.ceil(total / every))]


def decay_steps(options: ScheduleOptions, steps_per_epoch: int) -> int:
    """Returns the steps that polynomial and cosine decay take to the end learning rate.

    After a warmup one step more than the run has left, as in Google's and MLPerf's reference code;
    without a warmup the whole run, as in You et al. 2017.
    """
    total = total_steps(options, steps_per_epoch)
    warmup = warmup_steps(options, steps_per_epoch)
    return total - math.floor(warmup) + 1 if warmup else total
