"""Where to cut a model's gradients into segments, each of which is summed over replicas at once.

Going backward, a model knows its last layer's gradients first. A segment can be summed when the
first of its tensors, in the order of the layers, is known, and the segment before it, which has
later layers, is on its way no longer: sums share one network. Few segments save latency; many begin
early, and the less there is in the last one, the less is left to wait for after the pass backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from imagenet_fast.errors import UserError


class Transfer(NamedTuple):
    """The sum of a segment.

    Attributes:
      first: number of its first tensor, in the order of the layers.
      last: of its last one.
      begin: seconds, from when the pass backward began, at which it starts.
      end: the same, at which it is done.
    """

    first: int
    last: int
    begin: float
    end: float


def transfers(
    known: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    segments: Sequence[int] = (),
) -> list[Transfer]:
    """Returns when the segments of a model's gradients are summed, in the order of the sums.

    Args:
      known: seconds, from when the pass backward began, at which each gradient is known, in the
        order of the layers: the last one is known first.
      sizes: bytes of the gradients.
      cost: seconds that the sum of so many bytes takes.
      segments: the numbers of tensors after which a new segment begins; none: one segment.

    Raises:
      UserError: if the numbers are not increasing, or a segment would be empty.
    """
    edges = [0, *segments, len(sizes)]
    if any(after <= before for before, after in zip(edges, edges[1:])):
        raise UserError(
            f"segments of {len(sizes)} gradients cannot end after {', '.join(map(str, segments))}: "
            f"the numbers must increase and lie between 1 and {len(sizes) - 1}"
        )
    latest = _latest(known)
    found: list[Transfer] = []
    free = 0.0
    for first, end in reversed(list(zip(edges, edges[1:]))):
        begin = max(free, latest[first])
        free = begin + cost(sum(sizes[first:end]))
        found.append(Transfer(first, end - 1, begin, free))
    return found


def best_segments(
    known: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    count: int | None = None,
) -> tuple[int, ...]:
    """Returns the cuts with which all gradients are summed earliest.

    Exact, by dynamic programming: to have the gradients from a tensor on summed earlier never
    delays those before it, so that the best of each rest is part of a best whole.

    Args:
      known: as in :func:`transfers`.
      sizes: as there.
      cost: as there.
      count: of segments; None: as few as are as good as any.

    Returns:
      The numbers of tensors after which a new segment begins, as ``--fusion_segments`` takes them.

    Raises:
      UserError: if there are more segments than gradients.
    """
    tensors = len(sizes)
    if count is not None and not 1 <= count <= tensors:
        raise UserError(f"{tensors} gradients cannot be cut into {count} segments")
    latest = _latest(known)
    up_to = [0.0, *itertools.accumulate(sizes)]
    costs = [
        [cost(up_to[end] - up_to[first]) for end in range(first + 1, tensors + 1)]
        for first in range(tensors)
    ]

    def best(first: int, rests: Sequence[_Rest]) -> _Rest:
        """The best of the tensors from ``first`` on, with a segment before one of the rests."""
        return min(
            _Rest(max(rests[end].seconds, latest[first]) + own, rests[end].segments + 1, end)
            for end, own in enumerate(costs[first], first + 1)
        )

    rests = [_Rest(math.inf, 0, 0)] * tensors + [_Rest(0.0, 0, 0)]
    if count is None:
        for first in reversed(range(tensors)):
            rests[first] = best(first, rests)
        tables = [rests] * rests[0].segments
    else:
        tables = []
        for _ in range(count):
            rests = [*(best(first, rests) for first in range(tensors)), _Rest(math.inf, 0, 0)]
            tables.append(rests)
    ends = [0]
    for table in reversed(tables):
        ends.append(table[ends[-1]].end)
    return tuple(ends[1:-1])


class _Rest(NamedTuple):
    """How the tensors from one on are best summed; the first of two of these is the better one.

    Attributes:
      seconds: when they are summed.
      segments: of how many.
      end: where the first of these ends.
    """

    seconds: float
    segments: int
    end: int


def _latest(known: Sequence[float]) -> list[float]:
    """When each gradient and all of later layers are known."""
    return list(itertools.accumulate(reversed(known), max))[::-1]
