"""A step's graph with one node for each pass of each micro-batch, in any schedule."""

from __future__ import annotations

from typing import Any

from imagenet_fast.pipeline_parallel.passes import Kept, Passes
from imagenet_fast.pipeline_parallel.programs import Tensors
from imagenet_fast.pipeline_parallel.schedules import tasks


def unrolled(passes: Passes, schedule: str) -> None:
    """Runs all passes of all micro-batches.

    Args:
      passes: collects the results.
      schedule: of :func:`~imagenet_fast.pipeline_parallel.schedules.tasks`.
    """
    count, last = passes.batch.count, passes.last
    kept: dict[tuple[int, int], Kept] = {}
    # By micro-batch: outputs of the stage before, gradients from the stage after.
    outputs: dict[int, Any] = {}
    upstream: dict[int, Tensors] = {}
    for place, number, backward in tasks(schedule, last + 1, count, passes.devices):
        if not backward:
            inputs = outputs.pop(number) if place else passes.inputs(number)
            keep = passes.keeps(place, number)
            if keep or place < last or passes.loss is not None:
                kept[place, number], outputs[number] = passes.forward(place, number, inputs, keep)
            else:  # its backward pass follows at once, and computes the outputs
                kept[place, number] = Kept(inputs)
            continue
        if place == last:
            if passes.loss is not None and passes.outputs is None:
                passes.finish_forward([outputs[other] for other in range(count)])
            upstream[number] = passes.upstream(number)
        computed, upstream[number] = passes.backward(
            place, number, kept.pop((place, number)), upstream[number]
        )
        if computed is not None:
            outputs[number] = computed
    if passes.outputs is None:
        passes.finish_forward([outputs[number] for number in range(count)])
