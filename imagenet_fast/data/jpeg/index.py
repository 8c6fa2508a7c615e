"""Indexes of JPEGs, with which a crop costs only the decoding of the blocks around it.

``jpeg_index.h`` describes the method and the format.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data.images import PNG_SIGNATURE
from imagenet_fast.data.jpeg.image_ops import load_image_ops

# Crops of smaller images are on average decoded faster without an index.
LEAST_PIXELS = 200 * 200


def index_file(encoded: bytes, height: int, width: int) -> bytes | None:
    """Returns the index of an image file of a height and width in pixels.

    Returns:
      The index; empty for JPEGs that cannot have one; None for PNGs and small images, which need
      none.

    Raises:
      OSError: if the ops cannot be compiled or loaded.
    """
    if encoded.startswith(PNG_SIGNATURE) or height * width < LEAST_PIXELS:
        return None
    return index_jpegs(tf.constant(encoded)).numpy()


def index_jpegs(encoded: tf.Tensor) -> tf.Tensor:
    """Returns the indexes of JPEGs, a string tensor of any shape.

    Returns:
      Indexes, strings of the same shape. They are empty for files that are damaged or not
      sequential, Huffman-coded, 8-bit JPEGs of one scan and 1 or 3 components.

    Raises:
      OSError: if the ops cannot be compiled or loaded.
    """
    return tf.ensure_shape(load_image_ops().imagenet_fast_index_jpegs(jpegs=encoded), encoded.shape)
