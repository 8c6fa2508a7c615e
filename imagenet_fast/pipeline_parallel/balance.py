"""The balance of a pipeline: the number of blocks of each stage, by their cost and memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tf_keras as keras

from imagenet_fast.cost_model.pipeline import (
    BlockCost,
    micro_batches_in_memory,
    simulate,
    stage_memory,
)
from imagenet_fast.pipeline_parallel.partition import partition
from imagenet_fast.pipeline_parallel.profile import estimate, measure
from imagenet_fast.pipeline_parallel.schedules import Task, tasks

_PASSES = ("forward", "backward")


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
) -> list[int]:
    """Returns the balance with the least work of the slowest stage among those that fit.

    Args:
      blocks: consecutive; see :func:`~imagenet_fast.pipeline_parallel.profile.estimate`.
      inputs: specs of the first block's inputs, as ``tf.TensorSpec``, of any batch size.
      stages: their number.
      batch_size: examples in a batch.
      micro_batches: of a batch.
      schedule: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      rematerialize: as of ``GPipe``.
      devices: their number; None: one for each stage.
      slots: optimizer slots per trainable value.
      limit: bytes of memory of each device.
      device: on which to measure the blocks' seconds; empty: their FLOPs count.

    Raises:
      UserError: if there are fewer blocks than stages, the stages do not fit, or a block does what
        a pipeline cannot repeat or move.
      NotImplementedError: if a block that is not built has no ``get_config``, by which to copy it.
    """
    cost = functools.partial(measure, device=device) if device else estimate
    costs = cost(blocks, inputs, math.ceil(batch_size / micro_batches))
    order = tasks(schedule, stages, micro_batches, devices)
    limit *= (devices or stages) / stages
    return best_balance(costs, order, rematerialize, devices=devices, slots=slots, limit=limit)


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

    With several stages on each device, it then moves blocks between neighbouring stages while that
    makes the simulated batch faster: a device with a fast and a slow stage is not slow.

    If stages alternate between forward and backward passes and recompute activations, the last one
    has less work per block: its backward pass follows at once, so it recomputes nothing.

    Args:
      costs: of the blocks.
      order: of the tasks of all stages.
      rematerialize: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      devices: their number; stage k is on device k % ``devices``. None: one for each stage.
      slots: optimizer slots per trainable value.
      limit: bytes of memory of each stage.

    Raises:
      UserError: if there are fewer blocks than stages, or they do not fit.
    """
    holds = micro_batches_in_memory(order, rematerialize)
    recomputes = rematerialize != "never" and _alternates(order)

    @functools.cache
    def joined(first: int, end: int) -> BlockCost:
        last = costs[end - 1]
        return last if end - first == 1 else joined(first, end - 1).followed_by(last)

    def memory(stage: int, first: int, end: int) -> float:
        return stage_memory(joined(first, end), holds[stage], slots).total

    balance = partition(
        [cost.work + cost.forward * recomputes for cost in costs],
        len(holds),
        last_costs=[cost.work for cost in costs],
        memory=None if math.isinf(limit) else memory,
        limit=limit,
    )
    if devices in (None, len(balance)):
        return balance

    @functools.cache
    def seconds(balance: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(balance))
        places = [(end - count, end) for end, count in zip(ends, balance)]
        if min(balance) < 1 or any(
            memory(stage, *place) > limit for stage, place in enumerate(places)
        ):
            return math.inf
        stages = [joined(*place) for place in places]
        forward, backward = ([getattr(stage, name) for stage in stages] for name in _PASSES)
        return simulate(
            order, forward, backward, rematerialize=rematerialize, devices=devices
        ).seconds

    best = tuple(balance)
    while True:
        faster = min(_moves(best), key=seconds)
        if seconds(faster) >= seconds(best):
            return list(best)
        best = faster


def _moves(balance: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the balances that differ by one block moved to a neighbouring stage."""
    for stage in range(len(balance) - 1):
        for step in (1, -1):
            moved = list(balance)
            moved[stage] += step
            moved[stage + 1] -= step
            yield tuple(moved)


def _alternates(order: Sequence[Task]) -> bool:
    """Whether the first stage starts a backward pass before its last forward pass."""
    backward = [task.backward for task in order if not task.stage]
    return backward != sorted(backward)
