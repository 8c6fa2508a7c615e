"""Parts of a batch: equal micro-batches, for accumulation and pipelines, or a fraction of it."""

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


def images_in(images: tf.Tensor, fraction: float) -> tf.Tensor | int:
    """Returns the number of images in a fraction of a batch: rounded, and at least one.

    Args:
      images: [batch, ...]; if the batch size is known, so is the result.
      fraction: in (0, 1].
    """
    size = images.shape[0]
    if size is not None:
        return rounded_part(size, fraction)
    size = tf.shape(images)[0]
    count = tf.cast(tf.round(fraction * tf.cast(size, tf.float32)), tf.int32)
    return tf.minimum(size, tf.maximum(1, count))


def rounded_part(size: int, fraction: float) -> int:
    """Returns the number of images in a fraction of ``size``: rounded, and at least one."""
    return min(size, max(1, round(fraction * size)))
