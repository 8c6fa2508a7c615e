"""Times of a schedule that follow a change of the run's duration."""

from __future__ import annotations

from typing import Union

from imagenet_fast.base.durations import Duration

# Options that are times since the start of a run, or lengths of its parts.
TIMES = ("warmup", "decay_at", "decay_every", "knots_at", "train_until")

Times = Union[Duration, tuple[Duration, ...]]


def scale_times(times: Times, before: Duration, after: Duration) -> Times:
    """Scales times by the ratio of two durations of a run, which keeps the schedule's shape.

    Args:
      times: One or several.
      before: The duration to which they belong.
      after: The new duration.

    Returns:
      The times in their units, to five digits; unchanged if the three units differ.
    """
    if isinstance(times, tuple):
        return tuple(scale_times(time, before, after) for time in times)  # type: ignore[misc]
    if not times.unit == before.unit == after.unit:
        return times
    return Duration(float(f"{times.amount * after.amount / before.amount:.5g}"), times.unit)
