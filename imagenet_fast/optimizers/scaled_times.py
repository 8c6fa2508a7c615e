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


def scale_times(times: Times, before: Duration, after: Duration) -> Times:
    """Scales times to another duration of a run, of which they stay the same fractions.

    Args:
      times: One or several.
      before: The duration to which they belong.
      after: The new duration.

    Returns:
      The times to five digits, in their units, or in the unit of ``after`` if that of ``before``
      differs.

    Raises:
      UserError: if the three units differ, so that no fraction is known.
    """
    if isinstance(times, tuple):
        return tuple(scale_times(time, before, after) for time in times)  # type: ignore[misc]
    if not times.amount:
        return times
    if before.unit == after.unit:
        unit = times.unit
    elif times.unit == before.unit:
        unit = after.unit
    else:
        raise UserError(f"{times} of {before} is no known fraction of {after}")
    return Duration(float(f"{times.amount * after.amount / before.amount:.5g}"), unit)
