"""Where to cut a model's gradients into segments, each of which is summed over replicas at once.

Going backward, a model knows its last layer's gradients first. A segment can be summed when the
first of its tensors, in the order of the layers, is known, and the segment before it, which has
later layers, is on its way no longer: sums share one network. Few segments save latency; many begin
early, and the less there is in the last one, the less is left to wait for after the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from imagenet_fast.base.errors import UserError


class Transfer(NamedTuple):
    """The sum of a segment.

    Attributes:
      first: number of its first tensor, in the order of the layers.
      last: of its last one.
      begin: seconds, from when the backward pass began, at which it starts.
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
      known: seconds, from when the backward pass began, at which each gradient is known, in the
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
      count: of segments; None: as few as are as good as any.
      aside: as there.

    Returns:
      The numbers of tensors after which a new segment begins, as ``--fusion_segments`` takes them.

    Raises:
      UserError: if there are more segments than gradients.
    """
    if count is None:
        return few_segments(known, sizes, cost, 0.0, aside)
    if not 1 <= count <= len(sizes):
        raise UserError(f"{len(sizes)} gradients cannot be cut into {count} segments")
    *_, (_, cuts) = itertools.islice(_by_count(_Parts.of(known, sizes, cost, aside)), count)
    return cuts


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
    parts = _Parts.of(known, sizes, cost, aside)
    latest = _earliest(parts) + waste
    return next(cuts for end, cuts in _by_count(parts) if end <= latest)


class _Parts(NamedTuple):
    """All segments that there can be, by the first tensor and the last one.

    Attributes:
      ready: seconds at which each can be sent.
      costs: seconds that it is on its way; infinite where the last one comes before the first.
    """

    ready: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(
        cls,
        known: Sequence[float],
        sizes: Sequence[float],
        cost: Callable[[float], float],
        aside: float,
    ) -> _Parts:
        """Makes them."""
        up_to = [0.0, *itertools.accumulate(sizes)]
        latest = _latest(known)
        shape = (len(sizes), len(sizes))
        ready, costs = np.zeros(shape), np.full(shape, np.inf)
        for first, last in itertools.combinations_with_replacement(range(len(sizes)), 2):
            size = up_to[last + 1] - up_to[first]
            ready[first, last] = latest[first] + aside * size
            costs[first, last] = cost(size)
        return cls(ready, costs)

    def ends(self, first: int | slice, rests: np.ndarray) -> np.ndarray:
        """Returns when segments from ``first`` on are summed, after the rests behind each."""
        return np.maximum(rests, self.ready[first]) + self.costs[first]


def _earliest(parts: _Parts) -> float:
    """Returns when all gradients are summed with the best cuts."""
    tensors = len(parts.costs)
    ends = np.zeros(tensors + 1)
    for first in reversed(range(tensors)):
        ends[first] = parts.ends(first, ends[1:]).min()
    return ends[0]


def _by_count(parts: _Parts) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields when all are summed, and with which cuts, in one segment, in two and so on."""
    tensors = len(parts.costs)
    # When the tensors from one on are summed, and the last one of the segment that begins with it.
    ends = np.append(np.full(tensors, np.inf), 0.0)
    lasts: list[np.ndarray] = []
    for _ in range(tensors):
        found = parts.ends(slice(None), ends[1:])
        lasts.append(found.argmin(axis=1))
        ends = np.append(found.min(axis=1), np.inf)
        cuts = [0]
        for table in reversed(lasts):
            cuts.append(int(table[cuts[-1]]) + 1)
        yield float(ends[0]), tuple(cuts[1:-1])


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


def _latest(known: Sequence[float]) -> list[float]:
    """When each gradient and all of later layers are known."""
    return list(itertools.accumulate(reversed(known), max))[::-1]
