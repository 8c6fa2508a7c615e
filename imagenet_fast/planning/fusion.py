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

import numpy as np

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
    aside: float = 0.0,
) -> list[Transfer]:
    """Returns when the segments of a model's gradients are summed, in the order of the sums.

    Args:
      known: seconds, from when the pass backward began, at which each gradient is known, in the
        order of the layers: the last one is known first.
      sizes: bytes of the gradients.
      cost: seconds that the sum of so many bytes takes.
      segments: the numbers of tensors after which a new segment begins; none: one segment.
      aside: seconds for each byte that a segment takes besides before it is sent, while others are
        on their way: to join and to add.

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
        size = sum(sizes[first:end])
        begin = max(free, latest[first] + aside * size)
        free = begin + cost(size)
        found.append(Transfer(first, end - 1, begin, free))
    return found


def best_segments(
    known: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    count: int | None = None,
    aside: float = 0.0,
) -> tuple[int, ...]:
    """Returns the cuts with which all gradients are summed earliest.

    Exact, by dynamic programming: to have the gradients from a tensor on summed earlier never
    delays those before it, so that the best of each rest is part of a best whole.

    Args:
      known: as in :func:`transfers`.
      sizes: as there.
      cost: as there.
      count: of segments; None: with which they are summed earliest.
      aside: as there.

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
    # By the first tensor and the last one.
    parts = [
        [up_to[end] - up_to[first] for end in range(first + 1, tensors + 1)]
        for first in range(tensors)
    ]
    ready = [[own + aside * size for size in row] for own, row in zip(latest, parts)]
    costs = [[cost(size) for size in row] for row in parts]

    def best(first: int, rests: Sequence[_Rest]) -> _Rest:
        """The best of the tensors from ``first`` on, with a segment before one of the rests."""
        return min(
            _Rest(max(rests[end].seconds, begin) + own, rests[end].segments + 1, end)
            for end, (begin, own) in enumerate(zip(ready[first], costs[first]), first + 1)
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


def few_segments(
    known: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    waste: float,
    aside: float = 0.0,
) -> tuple[int, ...]:
    """Returns the fewest cuts with which all gradients are summed about as early as can be.

    Args:
      known: as in :func:`transfers`.
      sizes: as there.
      cost: as there.
      waste: seconds by which they may be summed later than with the best cuts.
      aside: as there.
    """

    def end(cuts: Sequence[int]) -> float:
        return transfers(known, sizes, cost, cuts, aside)[-1].end

    best = best_segments(known, sizes, cost, None, aside)
    for count in range(1, len(best) + 1):
        cuts = best_segments(known, sizes, cost, count, aside)
        if end(cuts) <= end(best) + waste:
            return cuts
    return best


class SumCost(NamedTuple):
    """What sums take.

    Attributes:
      start: seconds of each, however small it is.
      per_byte: seconds for each byte, in which no other sum is on its way.
      aside: seconds for each byte besides, in which others may be.
    """

    start: float
    per_byte: float
    aside: float


def fitted_cost(sizes: Sequence[float], counts: Sequence[int], seconds: Sequence[float]) -> SumCost:
    """Returns what fits measured sums best.

    By least squares of the relative errors, since large sums take a thousand times as long as small
    ones.

    Args:
      sizes: bytes that were summed.
      counts: in how many equal sums, all asked for at the same time.
      seconds: until all of these were done.
    """
    size, count = np.asarray(sizes, float), np.asarray(counts, float)
    rows = np.stack([count, size, size / count], axis=1) / np.asarray(seconds, float)[:, np.newaxis]
    wanted = np.ones(len(rows))
    fits = []
    for chosen in itertools.chain(*(itertools.combinations(range(3), n) for n in (1, 2, 3))):
        found = np.zeros(3)
        found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
        if found.min() >= 0:
            fits.append((float(np.sum((rows @ found - wanted) ** 2)), found.tolist()))
    _, best = min(fits)
    return SumCost(*best)


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
