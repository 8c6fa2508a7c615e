"""A batch split into equal micro-batches, for gradient accumulation and pipelines."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError


def micro_batches(batch: Sequence[tf.Tensor], count: int) -> list[tf.Tensor]:
    """Returns each tensor of a batch as [count, images, ...].

    Args:
      batch: tensors [batch, ...].
      count: number of micro-batches.

    Raises:
      UserError: if the batch size is not a multiple of ``count``; an unknown one is checked when
        the graph runs.
    """
    images = batch[0].shape[0]
    unequal = (
        f"cannot be split into accumulation_steps={count} equal micro-batches: choose another "
        "batch size, or drop a smaller last batch (drop_remainder=True)"
    )
    if images is not None and images % count:
        raise UserError(f"a replica's {images} images {unequal}")
    if images is None:
        size = tf.shape(batch[0])[0]
        equal = tf.equal(size % count, 0)
        check = tf.debugging.Assert(equal, [f"images that {unequal}; a replica has", size])
        with tf.control_dependencies([check]):
            batch = [tf.identity(tensor) for tensor in batch]
    parts = []
    for tensor in batch:
        shape = tf.concat([[count, -1], tf.shape(tensor)[1:]], 0)
        parts.append(tf.reshape(tensor, shape))
        parts[-1].set_shape([count, None, *tensor.shape[1:]])
    return parts
