"""A step's graph of two ``tf.while_loop``s, whose size does not grow with the micro-batches.

For the schedule ``gpipe``: one loop runs all forward passes, another all backward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow import TensorArray as Row  # one tensor for each micro-batch

from imagenet_fast.pipeline_parallel.passes import Kept, Passes, State
from imagenet_fast.pipeline_parallel.programs import Tensors


def looped(passes: Passes, keep: bool) -> None:
    """Runs all passes of all micro-batches.

    Unless the activations of all micro-batches are stored, the last one passes outside the loops,
    so that its activations can be stored.

    Args:
      passes: collects the results; with a loss of the whole batch.
      keep: whether to store the activations of all micro-batches.
    """
    count = passes.batch.count if keep else passes.batch.count - 1
    loops = _Loops(passes, count, keep)
    loops.forward()
    outputs, kept = [loops.outputs()], []
    if not keep:
        outputs.append(passes.inputs(count))
        for place in range(passes.last + 1):
            stored, outputs[-1] = passes.forward(
                place, count, outputs[-1], passes.keeps(place, count)
            )
            kept.append(stored)
    passes.finish_forward(outputs)
    if not keep:
        upstream = passes.upstream(count)
        for place in reversed(range(passes.last + 1)):
            _, upstream = passes.backward(place, count, kept[place], upstream)
    loops.backward()


class _Loops:
    """The forward loop, the backward loop, and what is stored between them."""

    def __init__(self, passes: Passes, count: int, keep: bool) -> None:
        self._passes, self._count, self._keep = passes, count, keep
        # What a stage stores: its inputs, unless they are the batch's, and activations.
        self._kept: list[list[Row]] = []
        inputs: Any = ()
        for place, programs in enumerate(passes.programs):
            specs = [*tf.nest.flatten(inputs), *(programs.activations if keep else ())]
            self._kept.append(self._rows(place, specs))
            inputs = programs.outputs
        self._outputs = self._rows(passes.last, tf.nest.flatten(inputs))

    def forward(self) -> None:
        """Runs the forward passes, first micro-batch first."""

        def body(
            number: tf.Tensor, state: list[State], kept: list[list[Row]], made: list[Row]
        ) -> Any:
            self._passes.state = state
            outputs = self._passes.inputs(number)
            for place, rows in enumerate(kept):
                stored, outputs = self._passes.forward(place, number, outputs, self._keep)
                values = [
                    *(tf.nest.flatten(stored.inputs) if place else ()),
                    *(stored.activations or ()),
                ]
                kept[place] = self._write(place, number, rows, values)
            made = self._write(self._passes.last, number, made, tf.nest.flatten(outputs))
            return number + 1, self._passes.state, kept, made

        _, self._passes.state, self._kept, self._outputs = self._loop(
            lambda number, *_: number < self._count,
            body,
            [tf.constant(0), self._passes.state, self._kept, self._outputs],
        )

    def backward(self) -> None:
        """Runs the backward passes, last micro-batch first."""

        def body(number: tf.Tensor, state: list[State]) -> Any:
            self._passes.state = state
            upstream: Tensors = self._passes.upstream(number)
            for place in reversed(range(len(self._kept))):
                _, upstream = self._passes.backward(
                    place, number, self._read(place, number), upstream
                )
            return number - 1, self._passes.state

        _, self._passes.state = self._loop(
            lambda number, *_: number >= 0,
            body,
            [tf.constant(self._count - 1), self._passes.state],
        )

    def outputs(self) -> Any:
        """Returns the outputs of the last stage for all micro-batches in the loop."""
        with tf.device(self._passes.stages[-1].device):
            joined = [row.concat() for row in self._outputs]
        return tf.nest.pack_sequence_as(self._passes.programs[-1].outputs, joined)

    def _loop(self, condition: Any, body: Any, begin: list[Any]) -> Any:
        # Enough iterations at a time to occupy all stages.
        return tf.while_loop(condition, body, begin, parallel_iterations=len(self._kept) + 1)

    def _rows(self, place: int, specs: Sequence[tf.TensorSpec]) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [
                tf.TensorArray(spec.dtype, self._count, element_shape=spec.shape, infer_shape=False)
                for spec in specs
            ]

    def _write(self, place: int, number: tf.Tensor, rows: list[Row], values: Tensors) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [row.write(number, tf.identity(value)) for row, value in zip(rows, values)]

    def _read(self, place: int, number: tf.Tensor) -> Kept:
        with tf.device(self._passes.stages[place].device):
            values = [row.read(number) for row in self._kept[place]]
        if not place:
            return Kept(self._passes.inputs(number), values if self._keep else None)
        inputs = self._passes.programs[place - 1].outputs
        count = len(tf.nest.flatten(inputs))
        return Kept(
            tf.nest.pack_sequence_as(inputs, values[:count]),
            values[count:] if self._keep else None,
        )
