"""A batch split into micro-batches of equal or nearly equal size."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from imagenet_fast.base.errors import UserError

_NOT_ROWS = (
    "the first dimension of an output is not the batch, so a pipeline cannot join the outputs of "
    "micro-batches: return [batch, n, ...] instead of [batch * n, ...], and reshape in the loss"
)
_CANNOT_SPLIT = "a pipeline cannot split into micro-batches"


class MicroBatches:
    """A batch split into micro-batches; the first ones may have one example more.

    A batch of fewer examples than ``count`` has one micro-batch for each example. If the batch size
    is only known when the graph runs, the graph still has ``count`` micro-batches: those beyond the
    batch repeat its last example, with weight 0.

    Args:
      inputs: tensors in any structure, whose first dimension is the batch.
      targets: the same.
      count: number of micro-batches of a batch with at least as many examples.

    Attributes:
      count: number of micro-batches.
      examples: in the batch; a tensor if the size is only known when the graph runs.
    """

    def __init__(self, inputs: Any, targets: Any, count: int) -> None:
        check_batch("inputs", inputs)
        check_batch("labels and sample weights", targets)
        first = tf.nest.flatten(inputs)[0]
        self._static = first.shape[0] is not None
        self.examples = first.shape[0] if self._static else tf.shape(first)[0]
        self.count = min(count, self.examples) if self._static else count
        self._inputs = inputs
        self._targets = targets

    @property
    def size(self) -> int | None:
        """Examples of each micro-batch, if they are equally many and known."""
        if self._static and self.examples % self.count == 0:
            return self.examples // self.count
        return None

    @property
    def specs(self) -> tuple[Any, Any]:
        """The ``tf.TensorSpec`` of a micro-batch's inputs and targets."""
        return tf.nest.map_structure(
            lambda whole: tf.TensorSpec([self.size, *whole.shape[1:]], whole.dtype),
            (self._inputs, self._targets),
        )

    def inputs(self, number: int | tf.Tensor) -> Any:
        """Returns the inputs of a micro-batch."""
        return tf.nest.map_structure(lambda whole: self.part(whole, number), self._inputs)

    def targets(self, number: int | tf.Tensor) -> Any:
        """Returns the targets of a micro-batch."""
        return tf.nest.map_structure(lambda whole: self.part(whole, number), self._targets)

    def fraction(self, number: int | tf.Tensor) -> float | tf.Tensor:
        """Returns the fraction of the batch in a micro-batch, as a float or float32.

        0 for a micro-batch that repeats an example.
        """
        begin, end = self._bounds(number)
        if isinstance(number, int) and self._static:
            return (end - begin) / self.examples
        return tf.cast(end - begin, tf.float32) / tf.cast(self.examples, tf.float32)

    def part(self, whole: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
        """Returns the rows of a micro-batch."""
        begin, end = self._bounds(number)
        if not self._static:
            begin = tf.minimum(begin, self.examples - 1)
            end = tf.maximum(end, begin + 1)
        rows = whole[begin:end]
        rows.set_shape([self.size, *whole.shape[1:]])
        return rows

    def gradient(self, whole: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
        """Returns the rows of a micro-batch in a gradient; 0 if they repeat an example."""
        rows = self.part(whole, number)
        if self._static:
            return rows
        begin, end = self._bounds(number)
        return tf.where(end > begin, rows, tf.zeros_like(rows))

    def joined(self, rows: tf.Tensor, count: int | tf.Tensor | None = None) -> tf.Tensor:
        """Returns the batch from an output's rows of micro-batches, without repeated examples.

        ``count`` is the number of micro-batches; None: all.

        Raises:
          UserError: if there is not one row for each example. If their number is only known when
            the graph runs, it raises an ``InvalidArgumentError`` instead.
        """
        found = rows.shape[0]
        if self._static and found is not None and found != self.examples:
            raise UserError(f"{_NOT_ROWS}: {found} rows for {self.examples} examples")
        if found is None or not self._static:
            expected = tf.maximum(self.examples, self.count if count is None else count)
            found = tf.shape(rows)[0]
            about = [_NOT_ROWS, "rows and examples:", found, self.examples]
            with tf.control_dependencies([tf.debugging.Assert(found == expected, about)]):
                rows = rows[: self.examples]
        rows.set_shape([self.examples if self._static else None, *rows.shape[1:]])
        return rows

    def _bounds(self, number: int | tf.Tensor) -> tuple[Any, Any]:
        """Returns the first row of a micro-batch and the row after its last one."""
        size, larger = self.examples // self.count, self.examples % self.count
        least = min if isinstance(number, int) and self._static else tf.minimum
        begin, end = (at * size + least(at, larger) for at in (number, number + 1))
        return begin, end


def check_batch(kind: str, batch: Any) -> None:
    """Checks that tensors of a ``kind``, or their specs, can be split into micro-batches.

    Raises:
      UserError: if one is ragged or sparse, has no known rank, or no dimensions.
    """
    for value in tf.nest.flatten(batch):
        spec = getattr(value, "type_spec", value)  # of a Keras input
        if isinstance(spec, (tf.RaggedTensor, tf.RaggedTensorSpec)):
            raise UserError(f"{_CANNOT_SPLIT} ragged {kind}: pad them with to_tensor()")
        if isinstance(spec, (tf.SparseTensor, tf.SparseTensorSpec)):
            raise UserError(f"{_CANNOT_SPLIT} sparse {kind}: use tf.sparse.to_dense")
        rank = tf.TensorShape(getattr(spec, "shape", [])).rank
        if rank is None:
            raise UserError(
                f"{_CANNOT_SPLIT} {kind} of unknown shape: use tf.ensure_shape in the data set, "
                "such as tf.ensure_shape(images, [None, 224, 224, 3])"
            )
        if not rank:
            raise UserError(f"{_CANNOT_SPLIT} {kind} without dimensions, such as {value}")


def check_outputs(outputs: Any) -> None:
    """Checks that tensors, or their specs, can be joined.

    Raises:
      UserError: if one is a scalar.
    """
    if any(output.shape.rank == 0 for output in tf.nest.flatten(outputs)):
        raise UserError(f"{_NOT_ROWS}: it is a scalar")
