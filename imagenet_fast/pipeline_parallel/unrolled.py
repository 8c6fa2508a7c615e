"""A schedule whose graph holds every pass of every micro-batch, in any order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from imagenet_fast.cost_model.pipeline import keeps_activations
from imagenet_fast.pipeline_parallel.orders import tasks
from imagenet_fast.pipeline_parallel.passes import Kept, Passes
from imagenet_fast.pipeline_parallel.programs import Tensors


def unrolled(passes: Passes, schedule: str, rematerialize: str) -> Any:
    """Takes all micro-batches forward and backward.

    Args:
      passes: adds up what is found.
      schedule: as of :func:`~imagenet_fast.pipeline_parallel.orders.tasks`.
      rematerialize: ``always``: of each stage only its inputs are kept, and its activations
        computed again; ``except_last``: those of the last micro-batch are kept; ``never``: all are.

    Returns:
      The outputs of the last stage for the whole batch.
    """
    count, last = passes.batch.count, passes.last
    kept: dict[tuple[int, int], Kept] = {}
    # By micro-batch: what the stage before, or after, has made of it.
    outputs: dict[int, Any] = {}
    upstream: dict[int, Tensors] = {number: [] for number in range(count)}
    for place, number, backward in tasks(schedule, last + 1, count):
        if backward:
            found, upstream[number] = passes.backward(
                place, number, kept.pop((place, number)), upstream[number]
            )
            if found is not None and place == last:
                outputs[number] = found
            continue
        inputs = outputs.pop(number) if place else passes.inputs(number)
        keep = keeps_activations(rematerialize, number, count)
        if keep or place < last:
            kept[place, number], outputs[number] = passes.forward(place, number, inputs, keep)
        else:  # its backward pass computes it anyway
            kept[place, number] = Kept(inputs)
    parts = [outputs[number] for number in range(count)]
    return tf.nest.map_structure(lambda *own: tf.concat(own, axis=0), *parts)
