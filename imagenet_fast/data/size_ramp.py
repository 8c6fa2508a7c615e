"""Progressive resizing by a ramp: image sizes that grow linearly over time, in steps."""

from __future__ import annotations

import math
from fractions import Fraction

from imagenet_fast.base.durations import Duration


def ramp_sizes(
    first: int, last: int, multiple: int, begin: Duration, end: Duration
) -> tuple[tuple[int, Duration], ...]:
    """Returns the sizes of a ramp before the last one, and the time at which each ends.

    The size grows linearly from ``first``, at ``begin``, to ``last``, at ``end``, and is rounded to
    the nearest multiple of ``multiple``; halfway between two, to the even one, as by ``np.round``.
    It is computed at whole units of time: with epochs, at the beginning of each epoch. This is
    ``get_resolution`` of ffcv-imagenet, by the epoch, and ``ProgressiveResizing`` of composer.

    Args:
      first: the size until ``begin``, in pixels, a multiple of ``multiple``.
      last: the size from ``end`` on, likewise, and larger.
      multiple: the difference of successive sizes.
      begin: time since the start of training.
      end: likewise, in the same unit, and not earlier.
    """
    sizes: list[tuple[int, Duration]] = []
    # 12.8 as 64/5: its float is a little more, which decides where the line is halfway.
    start, stop = Fraction(str(begin.amount)), Fraction(str(end.amount))
    length = stop - start
    for size in range(first, last, multiple):
        # When the line is halfway between this size and the next.
        halfway = start + length * Fraction(2 * (size - first) + multiple, 2 * (last - first))
        until = math.ceil(halfway)
        if until == halfway and size // multiple % 2 == 0:
            until += 1
        if until > (sizes[-1][1].amount if sizes else 0):
            sizes.append((size, Duration(until, begin.unit)))
    return tuple(sizes)
