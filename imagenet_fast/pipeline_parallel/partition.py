"""Partitions of a sequence of blocks into the stages of a pipeline.

A pipeline is as fast as its slowest stage, so the partition minimizes the largest cost of a stage,
exactly, by dynamic programming. (The GPipe paper minimizes the variance of the costs; Lingvo cuts
at equal fractions of the sum.)
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from imagenet_fast.base.errors import UserError

# From a stage's index and the indices of its first block and of the block after its last.
OfStage = Callable[[int, int, int], float]


def partition_by(
    cost: OfStage,
    blocks: int,
    stages: int,
    *,
    memory: OfStage | None = None,
    limit: float = math.inf,
) -> list[int]:
    """Returns the number of blocks of each stage.

    It minimizes the largest cost of a stage and, among partitions with the same largest cost, the
    sum of the squared costs. Its time is proportional to stages times blocks squared.

    Args:
      cost: returns the cost of a stage; not negative.
      blocks: number of blocks.
      stages: number of stages, at most the number of blocks.
      memory: returns the bytes that a stage needs; None: memory is not limited.
      limit: bytes of memory of each stage.

    Returns:
      The number of blocks of each stage, each at least 1.

    Raises:
      UserError: if there are fewer blocks than stages, or no partition keeps the limit.
    """
    check_stages(blocks, stages)
    if memory is None:
        return _best(cost, stages, blocks)
    balance = _best(
        lambda *stage: cost(*stage) if memory(*stage) <= limit else math.inf, stages, blocks
    )
    if not balance:
        least = _best(memory, stages, blocks)
        needed = max(memory(k, *part) for k, part in enumerate(parts_of(least)))
        raise UserError(
            f"the {blocks} blocks do not fit into {stages} stages of {limit / 2**30:.4g} GiB each: "
            f"in each partition, one needs at least {needed / 2**30:.4g} GiB; use more devices, "
            "larger ones, more micro-batches or smaller blocks"
        )
    return balance


def _best(cost: OfStage, stages: int, blocks: int) -> list[int]:
    """Returns the partition of :func:`partition_by`; empty if none has finite costs."""
    largest, _ = _least(cost, max, stages, blocks)
    if largest == math.inf:
        return []

    # A second search: a partition of the first blocks with a larger cost may have the smaller sum
    # of squares, where a later stage costs more anyway.
    def squared(stage: int, first: int, end: int) -> float:
        value = cost(stage, first, end)
        return value**2 if value <= largest else math.inf

    return _least(squared, operator.add, stages, blocks)[1]


def _least(
    cost: OfStage,
    join: Callable[[float, float], float],
    stages: int,
    blocks: int,
) -> tuple[float, list[int]]:
    """Returns the smallest joint cost of all stages, and its partition.

    ``join`` returns that of the stages so far and the next one; it is monotonic in both.
    """
    # By the number of blocks in the stages so far: the smallest cost, and the last stage's start.
    best = [0.0, *[math.inf] * blocks]
    begins: list[list[int]] = []
    for stage in range(stages):
        costs, starts = [math.inf] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for first in range(stage, end):
                if best[first] == math.inf:
                    continue
                value = join(best[first], cost(stage, first, end))
                if value < costs[end]:
                    costs[end], starts[end] = value, first
        best = costs
        begins.append(starts)
    ends = [blocks]
    for starts in reversed(begins):
        ends.append(starts[ends[-1]])
    ends.reverse()
    return best[blocks], [end - first for first, end in zip(ends, ends[1:])]


def bounds(balance: Sequence[int] | None, blocks: int, stages: int) -> list[tuple[int, int]]:
    """Returns the index of each stage's first block, and that of the block after its last.

    ``balance`` is the number of blocks of each stage; None: nearly equal numbers.

    Raises:
      UserError: if the blocks cannot be split like that.
    """
    check_stages(blocks, stages)
    if balance is None:
        balance = partition_by(lambda stage, first, end: float(end - first), blocks, stages)
    if not _are_integers(balance):
        raise UserError(
            f"balance is {balance!r}, but must be a list of the number of blocks of each stage, "
            "such as [2, 3]"
        )
    if len(balance) != stages:
        raise UserError(
            f"balance {list(balance)} has {len(balance)} stages, but there are {stages}"
        )
    if any(count < 1 for count in balance):
        raise UserError(f"balance {list(balance)} leaves a stage without blocks")
    if sum(balance) != blocks:
        raise UserError(
            f"balance {list(balance)} is of {sum(balance)} blocks, but there are {blocks}"
        )
    return parts_of(balance)


def parts_of(balance: Sequence[int]) -> list[tuple[int, int]]:
    """Returns :func:`bounds` without checks."""
    return [(end - n, end) for n, end in zip(balance, itertools.accumulate(balance))]


def _are_integers(values: Any) -> bool:
    """Whether these are several integers: in a list, a tuple or an array."""
    return isinstance(values, Iterable) and all(
        isinstance(value, numbers.Integral) and not isinstance(value, bool) for value in values
    )


def check_stages(blocks: int, stages: int) -> None:
    """Checks the number of stages.

    Raises:
      UserError: if it is not positive, or there are fewer blocks.
    """
    if not 1 <= stages <= blocks:
        raise UserError(
            f"{blocks} blocks cannot be split into {stages} stages: use between 1 and {blocks} "
            "stages, or cut the network into more blocks"
        )
