"""A schedule of two ``tf.while_loop``s, whose graph does not grow with the number of micro-batches.

All forward, then all backward, as ``orders.gpipe``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow import TensorArray as Row  # of tensors, one for each micro-batch

from imagenet_fast.pipeline_parallel.passes import Kept, Passes, State
from imagenet_fast.pipeline_parallel.programs import Tensors
from imagenet_fast.pipeline_parallel.unrolled import unrolled


def looped(passes: Passes, rematerialize: str) -> Any:
    """Takes all micro-batches forward and backward.

    Args:
      passes: adds up what is found.
      rematerialize: as of ``unrolled``.

    Returns:
      The outputs of the last stage for the whole batch.
    """
    apart = rematerialize == "except_last"  # the last micro-batch, whose activations are kept
    count = passes.batch.count - apart
    if not count:
        return unrolled(passes, "unrolled", rematerialize)
    loops = _Loops(passes, count, keep=rematerialize == "never")
    loops.forward()
    parts = [_there_and_back(passes, count)] if apart else []
    loops.backward()
    parts.insert(0, loops.outputs())
    return tf.nest.map_structure(lambda *own: tf.concat(own, axis=0), *parts)


def _there_and_back(passes: Passes, number: int) -> Any:
    """Takes one micro-batch forward and backward; returns its outputs."""
    outputs, kept = passes.inputs(number), []
    for place in range(passes.last + 1):
        own, outputs = passes.forward(place, number, outputs, keep=True)
        kept.append(own)
    upstream: Tensors = []
    for place in reversed(range(passes.last + 1)):
        _, upstream = passes.backward(place, number, kept[place], upstream)
    return outputs


class _Loops:
    """The loop forward and the loop backward, and what leads from the one to the other."""

    def __init__(self, passes: Passes, count: int, keep: bool) -> None:
        self._passes, self._count, self._keep = passes, count, keep
        # What a stage keeps: inputs, if they are another one's outputs, and activations.
        self._kept: list[list[Row]] = []
        given: Any = ()
        for place, programs in enumerate(passes.programs):
            specs = [*tf.nest.flatten(given), *(programs.activations if keep else ())]
            self._kept.append(self._rows(place, specs))
            given = programs.outputs
        self._outputs = self._rows(passes.last, tf.nest.flatten(given))

    def forward(self) -> None:
        """Takes the micro-batches forward, of the last stage only if activations are kept."""

        def body(
            number: tf.Tensor, state: list[State], kept: list[list[Row]], made: list[Row]
        ) -> Any:
            self._passes.state = state
            outputs = self._passes.inputs(number)
            for place, rows in enumerate(kept):
                own = Kept(outputs)
                if self._keep or place < self._passes.last:
                    own, outputs = self._passes.forward(place, number, outputs, self._keep)
                values = [*(tf.nest.flatten(own.inputs) if place else ()), *(own.activations or ())]
                kept[place] = self._write(place, number, rows, values)
            if self._keep:
                made = self._write(self._passes.last, number, made, tf.nest.flatten(outputs))
            return number + 1, self._passes.state, kept, made

        _, self._passes.state, self._kept, self._outputs = self._loop(
            lambda number, *_: number < self._count,
            body,
            [tf.constant(0), self._passes.state, self._kept, self._outputs],
        )

    def backward(self) -> None:
        """Takes them backward, the last one first."""

        def body(number: tf.Tensor, state: list[State], made: list[Row]) -> Any:
            self._passes.state = state
            upstream: Tensors = []
            for place in reversed(range(len(self._kept))):
                found, upstream = self._passes.backward(
                    place, number, self._read(place, number), upstream
                )
                if found is not None and place == self._passes.last:
                    made = self._write(place, number, made, tf.nest.flatten(found))
            return number - 1, self._passes.state, made

        _, self._passes.state, self._outputs = self._loop(
            lambda number, *_: number >= 0,
            body,
            [tf.constant(self._count - 1), self._passes.state, self._outputs],
        )

    def outputs(self) -> Any:
        """Returns the outputs of the last stage for these micro-batches."""
        with tf.device(self._passes.stages[-1].device):
            joined = [row.concat() for row in self._outputs]
        return tf.nest.pack_sequence_as(self._passes.programs[-1].outputs, joined)

    def _loop(self, condition: Any, body: Any, begin: list[Any]) -> Any:
        # As many as are in the pipeline at a time.
        return tf.while_loop(condition, body, begin, parallel_iterations=len(self._kept) + 1)

    def _rows(self, place: int, specs: Sequence[tf.TensorSpec]) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [
                tf.TensorArray(own.dtype, self._count, element_shape=own.shape, infer_shape=False)
                for own in specs
            ]

    def _write(self, place: int, number: tf.Tensor, rows: list[Row], values: Tensors) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [row.write(number, tf.identity(own)) for row, own in zip(rows, values)]

    def _read(self, place: int, number: tf.Tensor) -> Kept:
        with tf.device(self._passes.stages[place].device):
            values = [row.read(number) for row in self._kept[place]]
        if not place:
            return Kept(self._passes.inputs(number), values if self._keep else None)
        before = self._passes.programs[place - 1].outputs
        count = len(tf.nest.flatten(before))
        inputs = tf.nest.pack_sequence_as(before, values[:count])
        return Kept(inputs, values[count:] if self._keep else None)
