"""The balance of a pipeline: the number of blocks of each stage, by their cost and memory."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.partition import partition_by, parts_of
from imagenet_fast.pipeline_parallel.profile import estimate, measure
from imagenet_fast.pipeline_parallel.schedules import Task, tasks
from imagenet_fast.pipeline_parallel.simulation import (
    BlockCost,
    micro_batches_in_memory,
    passes_of_stages,
    simulate,
    stage_memory,
)

# Tasks that the search for the fastest balance may simulate, in a few seconds.
_MOST_TASKS = 1_000_000
# Random balances that it may start from.
_RESTARTS = 100


def balance_for(
    blocks: Sequence[keras.layers.Layer],
    inputs: Any,
    stages: int,
    *,
    batch_size: int,
    micro_batches: int,
    schedule: str,
    rematerialize: str,
    devices: int | None = None,
    slots: float = 0.0,
    limit: float = math.inf,
    device: str = "",
    given: Sequence[int] | None = None,
) -> list[int]:
    """Returns the balance of :func:`best_balance` for a network, or checks that a given one fits.

    Args:
      blocks: consecutive; see :func:`~imagenet_fast.pipeline_parallel.profile.estimate`.
      inputs: specs of the first block's inputs, as ``tf.TensorSpec``, of any batch size.
      stages: their number.
      batch_size: examples in a batch.
      micro_batches: of a batch.
      schedule: as of :class:`~imagenet_fast.pipeline_parallel.gpipe.GPipe`.
      rematerialize: as of ``GPipe``.
      devices: their number; None: one for each stage.
      slots: optimizer slots per trainable value.
      limit: bytes of memory of each device.
      device: on which to measure the blocks' seconds; empty: their FLOPs count.
      given: the balance to check and return; None: choose one.

    Raises:
      UserError: if there are fewer blocks than stages, the stages do not fit, or a block does what
        a pipeline cannot repeat or move.
      NotImplementedError: if a block that is not built has no ``get_config``, by which to copy it.
    """
    cost = functools.partial(measure, device=device) if device else estimate
    costs = cost(blocks, inputs, math.ceil(batch_size / micro_batches))
    order = tasks(schedule, stages, micro_batches, devices)
    if given is None:
        return best_balance(costs, order, rematerialize, devices=devices, slots=slots, limit=limit)
    memory = _Stages(costs, order, rematerialize, slots).device_memory(given, devices or stages)
    if max(memory) > limit:
        raise UserError(
            f"balance {list(given)} does not fit into devices of {limit / 2**30:.4g} GiB: one "
            f"needs {max(memory) / 2**30:.4g} GiB; use another balance, more devices, larger ones "
            "or more micro-batches"
        )
    return list(given)


def best_balance(
    costs: Sequence[BlockCost],
    order: Sequence[Task],
    rematerialize: str,
    *,
    devices: int | None = None,
    slots: float = 0.0,
    limit: float = math.inf,
) -> list[int]:
    """Returns the balance with the least work of the slowest stage among those that fit.

    A stage's work includes what it recomputes. With several stages on each device, where a device
    with a fast and a slow stage is not slow, it is the balance with the fastest simulated batch; if
    there are too many balances to try all, the fastest that a local search finds.

    Args:
      costs: of the blocks.
      order: of the tasks of all stages.
      rematerialize: as of :class:`~imagenet_fast.pipeline_parallel.gpipe.GPipe`.
      devices: their number; stage k is on device k % ``devices``. None: one for each stage.
      slots: optimizer slots per trainable value.
      limit: bytes of memory of each device.

    Raises:
      UserError: if there are fewer blocks than stages, or they do not fit.
    """
    stages = _Stages(costs, order, rematerialize, slots)
    split = functools.partial(partition_by, blocks=len(costs), stages=stages.count)
    if devices in (None, stages.count):
        memory = None if math.isinf(limit) else stages.memory
        return split(stages.work, memory=memory, limit=limit)
    starts = [split(stages.work), split(stages.memory)]
    return _fastest(stages, starts, devices, limit)


class _Stages:
    """The work and memory of possible stages, from arguments of :func:`best_balance`.

    A stage is its index, the index of its first block, and that of the block after its last.

    Attributes:
      count: number of stages.
      tasks: number of tasks of all stages in a batch.
    """

    def __init__(
        self, costs: Sequence[BlockCost], order: Sequence[Task], rematerialize: str, slots: float
    ) -> None:
        self._costs, self._order = costs, order
        self._rematerialize, self._slots = rematerialize, slots
        self._in_memory = micro_batches_in_memory(order, rematerialize)
        self._passes = passes_of_stages(order, rematerialize)
        self.count, self.tasks = len(self._passes), len(order)
        self._cost = functools.cache(self._join)

    def work(self, stage: int, first: int, end: int) -> float:
        """Returns the work of a stage for a batch."""
        forward, backward = self._passes[stage]
        cost = self._cost(first, end)
        return forward * cost.forward + backward * cost.backward

    def memory(self, stage: int, first: int, end: int) -> float:
        """Returns the bytes that a stage needs."""
        return stage_memory(self._cost(first, end), self._in_memory[stage], self._slots).total

    def device_memory(self, balance: Sequence[int], devices: int) -> list[float]:
        """Returns the bytes that each device needs."""
        totals = [0.0] * devices
        for stage, part in enumerate(parts_of(balance)):
            totals[stage % devices] += self.memory(stage, *part)
        return totals

    def seconds(self, balance: Sequence[int], devices: int) -> float:
        """Returns the time of a batch."""
        costs = [self._cost(*part) for part in parts_of(balance)]
        return simulate(
            self._order,
            [cost.forward for cost in costs],
            [cost.backward for cost in costs],
            rematerialize=self._rematerialize,
            devices=devices,
        ).seconds

    def _join(self, first: int, end: int) -> BlockCost:
        last = self._costs[end - 1]
        return last if end - first == 1 else self._cost(first, end - 1).followed_by(last)


def _fastest(
    stages: _Stages, starts: Sequence[Sequence[int]], devices: int, limit: float
) -> list[int]:
    """Returns the balance with the fastest simulated batch whose stages fit into the devices.

    It tries all balances or, if these are too many, those of local searches.

    Args:
      stages: their work and memory.
      starts: balances to start a search from; others are random.
      devices: their number.
      limit: bytes of memory of each.

    Raises:
      UserError: if none fits.
    """
    blocks = sum(starts[0])
    seconds = functools.cache(lambda balance: stages.seconds(balance, devices))

    @functools.cache
    def score(balance: tuple[int, ...]) -> tuple[float, float]:
        """Returns the bytes beyond the limit and, if there are none, the time."""
        if min(balance) < 1:
            return math.inf, 0.0
        beyond = sum(max(0.0, size - limit) for size in stages.device_memory(balance, devices))
        return (beyond, 0.0) if beyond else (0.0, seconds(balance))

    if math.comb(blocks - 1, stages.count - 1) * stages.tasks <= _MOST_TASKS:
        every = itertools.combinations(range(1, blocks), stages.count - 1)
        best = min((_between(blocks, cuts) for cuts in every), key=score)
    else:
        draw = random.Random(0)
        some = (sorted(draw.sample(range(1, blocks), stages.count - 1)) for _ in range(_RESTARTS))
        others = (_between(blocks, cuts) for cuts in some)
        best = tuple(starts[0])
        for start in itertools.chain(map(tuple, starts), others):
            # Moves blocks between neighbouring stages while that lowers the score.
            while score(moved := min(_moves(start), key=score)) < score(start):
                start = moved
            best = min(best, start, key=score)
            if seconds.cache_info().misses * stages.tasks > _MOST_TASKS:
                break
    if score(best)[0]:
        needed = max(stages.device_memory(best, devices))
        raise UserError(
            f"the {blocks} blocks do not fit into {stages.count} stages on {devices} devices of "
            f"{limit / 2**30:.4g} GiB each: in the best partition found, one needs "
            f"{needed / 2**30:.4g} GiB; use more devices, larger ones, more micro-batches or "
            "smaller blocks"
        )
    return list(best)


def _between(blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Returns the balance with these cuts."""
    return tuple(end - first for first, end in zip((0, *cuts), (*cuts, blocks)))


def _moves(balance: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the balances that differ by one block moved to a neighbouring stage."""
    for stage in range(len(balance) - 1):
        for step in (1, -1):
            moved = list(balance)
            moved[stage] += step
            moved[stage + 1] -= step
            yield tuple(moved)
