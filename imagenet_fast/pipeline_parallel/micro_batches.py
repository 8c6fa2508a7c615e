"""A batch in parts of sizes as equal as can be."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from imagenet_fast.base.errors import UserError


class MicroBatches:
    """The parts of a batch; the first ones may be larger by one.

    Args:
      inputs: tensors in any structure, whose first dimension is the batch's.
      targets: the same.
      count: how many parts there are.

    Attributes:
      count: the same.
      examples: in the batch; a tensor, if it is not known before the program runs.

    Raises:
      UserError: if there are fewer examples than parts; where that is not known before the program
        runs, it runs into an ``InvalidArgumentError``.
    """

    def __init__(self, inputs: Any, targets: Any, count: int) -> None:
        self.count = count
        first = tf.nest.flatten(inputs)[0]
        self.examples = first.shape[0]
        advice = (
            f"cannot be split into {count} micro-batches: use fewer, larger batches, or leave out "
            "what full batches leave of the data"
        )
        if self.examples is None:
            found = tf.shape(first)[0]
            check = tf.debugging.Assert(found >= count, [f"a batch {advice}. Its examples:", found])
            with tf.control_dependencies([check]):
                self.examples = tf.identity(found)
        elif self.examples < count:
            raise UserError(f"a batch of {self.examples} {advice}")
        self._inputs = inputs
        self._targets = targets

    @property
    def size(self) -> int | None:
        """Of each part, if all have the same, known one."""
        if isinstance(self.examples, int) and self.examples % self.count == 0:
            return self.examples // self.count
        return None

    @property
    def specs(self) -> tuple[Any, Any]:
        """What describes the inputs and the targets of a part."""
        return tf.nest.map_structure(
            lambda own: tf.TensorSpec([self.size, *own.shape[1:]], own.dtype),
            (self._inputs, self._targets),
        )

    def inputs(self, number: int | tf.Tensor) -> Any:
        """Returns the inputs of a part."""
        return tf.nest.map_structure(lambda own: self._part(own, number), self._inputs)

    def targets(self, number: int | tf.Tensor) -> Any:
        """Returns the targets of a part."""
        return tf.nest.map_structure(lambda own: self._part(own, number), self._targets)

    def share(self, number: int | tf.Tensor) -> float | tf.Tensor:
        """Returns the fraction of a part in the batch; a tensor is float32."""
        begin, end = self._bounds(number)
        if isinstance(end, int) and isinstance(self.examples, int):
            return (end - begin) / self.examples
        return tf.cast(end - begin, tf.float32) / tf.cast(self.examples, tf.float32)

    def _bounds(self, number: int | tf.Tensor) -> tuple[Any, Any]:
        size, larger = self.examples // self.count, self.examples % self.count
        known = isinstance(number, int) and isinstance(larger, int)
        least = min if known else tf.minimum
        return tuple(own * size + least(own, larger) for own in (number, number + 1))

    def _part(self, values: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
        begin, end = self._bounds(number)
        part = values[begin:end]
        part.set_shape([self.size, *values.shape[1:]])
        return part
