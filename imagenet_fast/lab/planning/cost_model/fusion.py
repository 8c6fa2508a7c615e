"""Gradient fusion: when segments of gradients are all-reduced, and which segments finish first.

The backward pass computes the last layer's gradients first. A segment can be all-reduced when the
last of its gradients is ready and the segment of later layers is done: all-reduces share one
network. Few segments save latency. Many segments start earlier, and the smaller the last one, the
shorter the wait after the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from imagenet_fast.base.errors import UserError


class Transfer(NamedTuple):
    """The all-reduce of a segment.

    Attributes:
      first: number of its first tensor, in the order of the layers.
      last: number of its last tensor.
      begin: seconds from the start of the backward pass to the start of the all-reduce.
      end: seconds from there to its end.
    """

    first: int
    last: int
    begin: float
    end: float


def transfers(
    ready: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    segments: Sequence[int] = (),
) -> list[Transfer]:
    """Returns when the segments of a model's gradients are all-reduced, in that order.

    Args:
      ready: seconds from the start of the backward pass at which each gradient is ready, in the
        order of the layers: the last one is ready first.
      sizes: bytes of the gradients.
      cost: returns the seconds that an all-reduce of this number of bytes takes.
      segments: the numbers of tensors after which a new segment begins; empty: one segment.

    Raises:
      UserError: if the numbers are not increasing, or a segment would be empty.
    """
    edges = [0, *segments, len(sizes)]
    if any(after <= before for before, after in zip(edges, edges[1:])):
        raise UserError(
            f"segments of {len(sizes)} gradients cannot end after {', '.join(map(str, segments))}: "
            f"the numbers must increase and lie between 1 and {len(sizes) - 1}"
        )
    latest = _latest(ready).tolist()
    schedule: list[Transfer] = []
    free = 0.0
    for first, end in reversed(list(zip(edges, edges[1:]))):
        begin = max(free, latest[first])
        free = begin + cost(sum(sizes[first:end]))
        schedule.append(Transfer(first, end - 1, begin, free))
    return schedule


def best_segments(
    ready: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    count: int | None = None,
) -> tuple[int, ...]:
    """Returns the segments whose last all-reduce ends first.

    Exact, by dynamic programming: all-reducing the later layers sooner never delays the earlier
    ones, so an optimal solution contains optimal solutions for the later layers.

    Of ``count`` segments; None: of the fewest with the earliest end. Other arguments are those of
    :func:`transfers`.

    Returns:
      The numbers of tensors after which a new segment begins, as ``--fusion_segments`` takes them.

    Raises:
      UserError: if there are more segments than gradients.
    """
    if count is None:
        return few_segments(ready, sizes, cost, 0.0)
    if not 1 <= count <= len(sizes):
        raise UserError(f"{len(sizes)} gradients cannot be cut into {count} segments")
    *_, (_, segments) = itertools.islice(_by_count(_latest(ready), _costs(sizes, cost)), count)
    return segments


def few_segments(
    ready: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], float],
    waste: float,
) -> tuple[int, ...]:
    """Returns the fewest segments that end at most ``waste`` seconds after the best ones.

    Other arguments are those of :func:`transfers`.
    """
    latest, costs = _latest(ready), _costs(sizes, cost)
    deadline = _earliest_end(latest, costs) + waste
    return next(segments for end, segments in _by_count(latest, costs) if end <= deadline)


def _latest(ready: Sequence[float]) -> np.ndarray:
    """Returns when each gradient and all of later layers are ready."""
    return np.maximum.accumulate(np.asarray(ready, float)[::-1])[::-1]


def _costs(sizes: Sequence[float], cost: Callable[[float], float]) -> np.ndarray:
    """Returns the seconds of a segment by its first and last tensor; infinite if last < first."""
    up_to = [0.0, *itertools.accumulate(sizes)]
    costs = np.full((len(sizes), len(sizes)), np.inf)
    for first, last in itertools.combinations_with_replacement(range(len(sizes)), 2):
        costs[first, last] = cost(up_to[last + 1] - up_to[first])
    return costs


def _earliest_end(latest: np.ndarray, costs: np.ndarray) -> float:
    """Returns the earliest end of the last all-reduce, over all segments."""
    ends = np.zeros(len(costs) + 1)
    for first in reversed(range(len(costs))):
        ends[first] = (np.maximum(ends[1:], latest[first]) + costs[first]).min()
    return float(ends[0])


def _by_count(latest: np.ndarray, costs: np.ndarray) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields the earliest end, and the segments that reach it, for one segment, two and so on."""
    tensors = len(costs)
    # By first tensor: when it and all later ones are done, and the last of the segment it begins.
    ends = np.append(np.full(tensors, np.inf), 0.0)
    lasts: list[np.ndarray] = []
    for _ in range(tensors):
        choices = np.maximum(ends[1:], latest[:, np.newaxis]) + costs
        lasts.append(choices.argmin(axis=1))
        ends = np.append(choices.min(axis=1), np.inf)
        edges = [0]
        for table in reversed(lasts):
            edges.append(int(table[edges[-1]]) + 1)
        yield float(ends[0]), tuple(edges[1:-1])
