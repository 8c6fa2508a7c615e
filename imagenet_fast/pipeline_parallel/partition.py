"""Splitting a sequence of blocks into stages of a pipeline, one for each device.

A pipeline is as fast as its slowest stage, so the largest cost of a stage is made as small as it
can be: exactly, by dynamic programming. (The GPipe paper minimizes the variance of the costs,
lingvo cuts at equal shares of the sum.)
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
    """Returns how many blocks each stage gets.

    The largest cost of a stage is as small as possible and, of partitions with the same one, so is
    the sum of the squares of all. Takes time in proportion to stages times blocks squared.

    Args:
      costs: of each block, as its time forward and backward; not negative.
      stages: how many there are to be, at most one for each block.
      last_costs: of each block, if it is in the last stage; None: the same.
      transfers: what it costs a stage to receive the outputs of each block but the last; None:
        nothing.
      memory: the bytes that a stage needs, from its number, that of its first block, and that of
        the block after its last one; None: they do not count.
      limit: bytes that each stage may have.

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
        needed = max(memory(k, end - own, end) for k, (own, end) in enumerate(zip(least, ends)))
        raise UserError(
            f"the {blocks} blocks do not fit into {stages} stages of {limit / 2**30:.4g} GiB each: "
            f"in each partition, one needs at least {needed / 2**30:.4g} GiB; use more devices, "
            "larger ones, more micro-batches or smaller blocks"
        )
    return balance


def _best(cost: Callable[[int, int, int], float], stages: int, blocks: int) -> list[int]:
    """Returns the best partition, as :func:`partition` says; nothing if none has finite costs.

    Args:
      cost: of a stage, from its number, that of its first block, and that after its last one.
      stages: how many there are to be.
      blocks: how many there are.
    """
    largest, _ = _least(cost, max, stages, blocks)
    if largest == math.inf:
        return []

    # Not along with the largest cost: of the first blocks, a partition that is worse by that may be
    # the better one where a later stage costs more.
    def squared(stage: int, first: int, end: int) -> float:
        own = cost(stage, first, end)
        return own**2 if own <= largest else math.inf

    return _least(squared, operator.add, stages, blocks)[1]


def _least(
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    stages: int,
    blocks: int,
) -> tuple[float, list[int]]:
    """Returns the least that stages cost together, and the partition in which they do.

    Args:
      cost: of a stage, from its number, that of its first block, and that after its last one.
      join: the cost of some stages and that of the next one; not less than before where either is
        more.
      stages: how many there are to be.
      blocks: how many there are.
    """
    # Of the first blocks in a number of stages: the least cost, and where the last stage begins.
    best = [0.0, *[math.inf] * blocks]
    begins: list[list[int]] = []
    for stage in range(stages):
        costs, starts = [math.inf] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for first in range(stage, end):
                if best[first] == math.inf:
                    continue
                own = join(best[first], cost(stage, first, end))
                if own < costs[end]:
                    costs[end], starts[end] = own, first
        best = costs
        begins.append(starts)
    ends = [blocks]
    for starts in reversed(begins):
        ends.append(starts[ends[-1]])
    ends.reverse()
    return best[blocks], [end - first for first, end in zip(ends, ends[1:])]


def bounds(balance: Sequence[int] | None, blocks: int, stages: int) -> list[tuple[int, int]]:
    """Returns the first block of each stage, and the one after its last.

    Args:
      balance: how many blocks each stage gets; None: about as many each.
      blocks: how many there are.
      stages: the same.

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
    """Checks how many blocks each stage is to have.

    Raises:
      UserError: if they are not all the blocks, or a stage has none.
    """
    if any(own < 1 for own in balance):
        raise UserError(f"balance {list(balance)} leaves a stage without blocks")
    if sum(balance) != blocks:
        raise UserError(
            f"balance {list(balance)} is of {sum(balance)} blocks, but there are {blocks}"
        )


def check_stages(blocks: int, stages: int) -> None:
    """Checks that there is a block for each stage.

    Raises:
      UserError: if there is not.
    """
    if not 1 <= stages <= blocks:
        raise UserError(
            f"{blocks} blocks cannot be split into {stages} stages: use between 1 and {blocks} "
            "devices, or cut the network into more blocks"
        )
