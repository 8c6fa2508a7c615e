"""Rows of numbers about all images of an evaluation, kept on the devices until its end."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.one_call import assign_local, local_values, local_variable


class Rows:
    """A row for each of at most ``images`` images that a replica sees; others are ``fill``.

    To be made outside of replicas, in all workers.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, images: int, columns: int, fill: float = 0.0
    ) -> None:
        self._shape, self._fill = [images, columns], fill
        with strategy.scope():
            self._count, self._rows = (
                local_variable(value, name) for name, value in zip(("count", "rows"), self._empty())
            )

    def _empty(self) -> list[tf.Tensor]:
        return [tf.constant(0, tf.int64), tf.fill(self._shape, self._fill)]

    def reset(self) -> None:
        """Forgets all rows; in a replica."""
        assign_local([self._count, self._rows], self._empty())

    def count(self) -> tf.Tensor:
        """Returns the number of rows so far, int64; in a replica."""
        (count,) = local_values([self._count])
        return count

    def add(self, rows: tf.Tensor) -> None:
        """Adds those of a batch, float32 [batch, columns]; in a replica."""
        count = self.count()
        more = tf.shape(rows, tf.int64)[0]
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._rows.handle, indices=count + tf.range(more), updates=rows
        )
        assign_local([self._count], [count + more])

    def of_all_replicas(self) -> tf.Tensor:
        """Returns the rows of all replicas, float32 [rows, columns]; in a replica."""
        (rows,) = local_values([self._rows])
        return gathered(rows)


def gathered(part: tf.Tensor) -> tf.Tensor:
    """Returns the parts [rows, ...] of all replicas, [replicas * rows, ...]; in a replica.

    Each replica adds its part to zeros.
    """
    context = tf.distribute.get_replica_context()
    replicas, replica = context.num_replicas_in_sync, context.replica_id_in_sync_group
    parts = tf.scatter_nd([[replica]], part[tf.newaxis], [replicas, *part.shape])
    parts = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
    return tf.reshape(parts, [-1, *part.shape[1:]])
