"""Partitions of a sequence of blocks into the stages of a pipeline.

A pipeline is as fast as its slowest stage, so the partition minimizes the largest cost of a stage,
exactly, by dynamic programming. (The GPipe paper minimizes the variance of the costs; Lingvo cuts
at equal fractions of the sum.)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

from imagenet_fast.base.errors import UserError


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    last_costs: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    memory: Callable[[int, int, int], float] | None = None,
    limit: float = math.inf,
) -> list[int]:
    """Returns the number of blocks of each stage.

    It minimizes the largest cost of a stage and, among partitions with the same largest cost, the
    sum of the squared costs. Its time is proportional to stages times blocks squared.

    Args:
      costs: cost of each block, such as the time of its forward and backward pass; not negative.
      stages: number of stages, at most the number of blocks.
      last_costs: cost of each block in the last stage; None: the same.
      transfers: cost for a stage to receive the outputs of each block but the last; None: 0.
      memory: returns the bytes that a stage needs, from its index and the indices of its first
        block and of the block after its last; None: memory is not limited.
      limit: bytes of memory of each stage.

    Returns:
      The number of blocks of each stage, each at least 1.

    Raises:
      UserError: if there are fewer blocks than stages, or no partition keeps the limit.
    """
    blocks = len(costs)
    check_stages(blocks, stages)
    before = [0.0, *itertools.accumulate(costs)]
    last_before = [0.0, *itertools.accumulate(costs if last_costs is None else last_costs)]

    def cost(stage: int, first: int, end: int) -> float:
        sums = last_before if stage == stages - 1 else before
        return sums[end] - sums[first] + (transfers[first - 1] if transfers and first else 0.0)

    if memory is None:
        return _best(cost, stages, blocks)
    balance = _best(
        lambda *stage: cost(*stage) if memory(*stage) <= limit else math.inf, stages, blocks
    )
    if not balance:
        least = _best(memory, stages, blocks)
        ends = list(itertools.accumulate(least))
        needed = max(memory(k, end - n, end) for k, (n, end) in enumerate(zip(least, ends)))
        raise UserError(
            f"the {blocks} blocks do not fit into {stages} stages of {limit / 2**30:.4g} GiB each: "
            f"in each partition, one needs at least {needed / 2**30:.4g} GiB; use more devices, "
            "larger ones, more micro-batches or smaller blocks"
        )
    return balance


def _best(cost: Callable[[int, int, int], float], stages: int, blocks: int) -> list[int]:
    """Returns the partition of :func:`partition`; empty if none has finite costs.

    Args:
      cost: returns a stage's cost, from its index and the indices of its first block and of the
        block after its last.
      stages: number of stages.
      blocks: number of blocks.
    """
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
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    stages: int,
    blocks: int,
) -> tuple[float, list[int]]:
    """Returns the smallest joint cost of all stages, and its partition.

    Args:
      cost: as in :func:`_best`.
      join: returns the joint cost of the stages so far and the next one; monotonic in both.
      stages: number of stages.
      blocks: number of blocks.
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

    Args:
      balance: number of blocks of each stage; None: nearly equal numbers.
      blocks: number of blocks.
      stages: number of stages.

    Raises:
      UserError: if the blocks cannot be split like that.
    """
    check_stages(blocks, stages)
    balance = partition([1.0] * blocks, stages) if balance is None else balance
    if len(balance) != stages:
        raise UserError(
            f"balance {list(balance)} has {len(balance)} stages, but there are {stages} devices"
        )
    check_balance(balance, blocks)
    ends = list(itertools.accumulate(balance))
    return [(end - count, end) for end, count in zip(ends, balance)]


def check_balance(balance: Sequence[int], blocks: int) -> None:
    """Checks the number of blocks of each stage.

    Raises:
      UserError: if they do not add up to all blocks, or a stage has none.
    """
    if any(count < 1 for count in balance):
        raise UserError(f"balance {list(balance)} leaves a stage without blocks")
    if sum(balance) != blocks:
        raise UserError(
            f"balance {list(balance)} is of {sum(balance)} blocks, but there are {blocks}"
        )


def check_stages(blocks: int, stages: int) -> None:
    """Checks the number of stages.

    Raises:
      UserError: if it is not positive, or there are fewer blocks.
    """
    if not 1 <= stages <= blocks:
        raise UserError(
            f"{blocks} blocks cannot be split into {stages} stages: use between 1 and {blocks} "
            "devices, or cut the network into more blocks"
        )
