"""How many blocks each stage of a pipeline gets, by what they cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import tf_keras as keras

from imagenet_fast.cost_model.pipeline import BlockCost, micro_batches_in_memory, stage_memory
from imagenet_fast.pipeline_parallel.partition import partition
from imagenet_fast.pipeline_parallel.profile import estimate
from imagenet_fast.pipeline_parallel.schedules import Task, tasks


def balance_for(
    blocks: Sequence[keras.layers.Layer],
    inputs: Any,
    stages: int,
    *,
    batch_size: int,
    micro_batches: int,
    schedule: str,
    rematerialize: str,
) -> list[int]:
    """Returns the balance with the least work, in FLOPs, of the slowest stage.

    Args:
      blocks: that follow each other; see :func:`~imagenet_fast.pipeline_parallel.profile.estimate`.
      inputs: what describes the first one's, as ``tf.TensorSpec``, of any batch.
      stages: how many there are to be.
      batch_size: examples in a batch.
      micro_batches: parts of a batch.
      schedule: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      rematerialize: as of ``GPipe``.

    Raises:
      UserError: if there are fewer blocks than stages, or a block does what cannot be done in a
        pipeline.
    """
    costs = estimate(blocks, inputs, math.ceil(batch_size / micro_batches))
    return best_balance(costs, tasks(schedule, stages, micro_batches), rematerialize)


def best_balance(
    costs: Sequence[BlockCost],
    order: Sequence[Task],
    rematerialize: str,
    *,
    slots: float = 0.0,
    limit: float = math.inf,
) -> list[int]:
    """Returns the balance with the least work of the slowest stage among those that fit.

    Where the stages make forward and backward in turn and compute their activations once more, the
    last one has less to do for each block: it does not.

    Args:
      costs: of the blocks.
      order: of the tasks of all stages.
      rematerialize: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      slots: values that the optimizer keeps of each trained weight.
      limit: bytes that each stage may have.

    Raises:
      UserError: if there are fewer blocks than stages, or they do not fit.
    """
    holds = micro_batches_in_memory(order, rematerialize)
    again = rematerialize != "never" and _in_turn(order)

    @functools.cache
    def joined(first: int, end: int) -> BlockCost:
        own = costs[end - 1]
        return own if end - first == 1 else joined(first, end - 1).followed_by(own)

    def memory(stage: int, first: int, end: int) -> float:
        return stage_memory(joined(first, end), holds[stage], slots).total

    return partition(
        [own.work + own.forward * again for own in costs],
        len(holds),
        last_costs=[own.work for own in costs],
        memory=None if math.isinf(limit) else memory,
        limit=limit,
    )


def _in_turn(order: Sequence[Task]) -> bool:
    """Whether the first stage goes back before it has made all its forward passes."""
    backward = [task.backward for task in order if not task.stage]
    return backward != sorted(backward)
