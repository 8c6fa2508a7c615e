"""Times of a schedule that follow a change of the run's duration."""

from __future__ import annotations

from typing import Union

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError

# Options that are times since the start of a run, or lengths of its parts.
TIMES = (
    *("warmup", "whitening_bias_until", "decay_at", "decay_every", "knots_at"),
    *("train_until", "size_ramp_at"),
)

Times = Union[Duration, tuple[Duration, ...]]


def scale_times(times: Times, before: Duration, after: Duration, batch_growth: float = 1) -> Times:
    """Scales times to another duration of a run, of which they stay the same fractions.

    Args:
      times: one or several.
      before: the duration to which they belong.
      after: the new duration.
      batch_growth: the new batch size over the one to which they belong.

    Returns:
      The times to five digits, in their units, or in the unit of ``after`` if that of ``before``
      differs.

    Raises:
      UserError: if the three units differ, so that no fraction is known.
    """
    if isinstance(times, tuple):
        # Zeros keep the unit of the others.
        scaled = any(time.amount for time in times)
        if not scaled:
            return times
        return tuple(_scale(time, before, after, batch_growth) for time in times)
    return _scale(times, before, after, batch_growth) if times.amount else times


def _scale(time: Duration, before: Duration, after: Duration, batch_growth: float) -> Duration:
    factor = after.amount / before.amount
    if before.unit == after.unit:
        unit = time.unit
        # As many steps of larger batches are more images, as many images fewer steps.
        if before.unit == "steps" != unit:
            factor *= batch_growth
        elif before.unit != "steps" == unit:
            factor /= batch_growth
    elif time.unit == before.unit:
        unit = after.unit
    else:
        raise UserError(f"{time} of {before} is no known fraction of {after}")
    if factor == 1 and unit == time.unit:
        return time
    return Duration(float(f"{time.amount * factor:.5g}"), unit)
