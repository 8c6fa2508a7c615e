"""Native ops that index JPEGs, and cut crops out of indexed JPEGs without decoding them.

Decoding a crop then costs only the decoding of the blocks around it. ``jpeg_index.h`` describes the
method and the format of an index; ``jpeg_ops.cc`` is compiled at first use.
"""

from __future__ import annotations

import pathlib
import threading
from types import ModuleType

import numpy as np
import tensorflow as tf

from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.images import PNG_SIGNATURE

# Crops of smaller images are on average decoded faster without an index.
LEAST_PIXELS = 200 * 200

_warned = threading.Event()
_FOLDER = pathlib.Path(__file__).parent
_FILES = tuple(_FOLDER / name for name in ("jpeg_ops.cc", "jpeg_index.cc", "jpeg_index.h"))


def load_jpeg_ops() -> ModuleType:
    """Returns the ops, after compiling them at the first call.

    Raises:
      OSError: if they cannot be compiled or loaded; the message gives the reason.
    """
    return load_ops(*_FILES)


def index_file(encoded: bytes, height: int, width: int) -> bytes | None:
    """Returns the index of an image file.

    Args:
      encoded: bytes of the file.
      height: in pixels.
      width: in pixels.

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
    """Returns the indexes of JPEGs.

    Args:
      encoded: bytes of the files, a string tensor of any shape.

    Returns:
      Indexes, strings of the same shape. They are empty for files that are damaged or not
      sequential, Huffman-coded, 8-bit JPEGs of one scan and 1 or 3 components.

    Raises:
      OSError: if the ops cannot be compiled or loaded.
    """
    return tf.ensure_shape(load_jpeg_ops().imagenet_fast_index_jpegs(jpegs=encoded), encoded.shape)


def cut_jpegs(
    encoded: tf.Tensor,
    indexes: tf.Tensor,
    boxes: tf.Tensor,
    scales: tf.Tensor,
    warn: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Cuts the blocks around crop boxes out of JPEGs, without decoding them.

    Args:
      encoded: bytes of the image files, string [images].
      indexes: their indexes, string [images]; empty for files without one.
      boxes: int32 [images, 4]: top, left, height and width, in pixels.
      scales: int32 [images]: 1, 2, 4 or 8; the cuts are to be decoded at 1/scale of their size.
      warn: whether to warn once if indexes do not fit their images. This calls Python, which
        TensorFlow graphs that run in other processes cannot.

    Returns:
      The cuts, which are JPEGs, string [images]; the boxes in them, int32 [images, 4]; and which
      images were cut, bool [images]. A decoded cut's pixels in its box are bit-equal to those of
      the whole image. Images whose index is empty, damaged or of another file, or whose box is not
      in the image, are returned unchanged.

    Raises:
      OSError: if the ops cannot be compiled or loaded.
    """
    cuts, cut_boxes, were_cut, misfits = load_jpeg_ops().imagenet_fast_cut_jpegs(
        jpegs=encoded, indexes=indexes, boxes=boxes, scales=scales
    )
    (images,) = encoded.shape
    if warn:
        tf.cond(
            tf.reduce_any(misfits),
            lambda: tf.numpy_function(_warn_of_misfits, [misfits], tf.bool),
            lambda: True,
        )
    return (
        tf.ensure_shape(cuts, [images]),
        tf.ensure_shape(cut_boxes, [images, 4]),
        tf.ensure_shape(were_cut, [images]),
    )


def _warn_of_misfits(misfits: np.ndarray) -> bool:
    if not _warned.is_set():
        _warned.set()
        warn_once(
            f"jpeg_index: {misfits.sum()} of the {misfits.size} JPEGs of a batch do not match "
            "their indexes, as after re-encoding, and are decoded more slowly: replace the indexes "
            "with `imagenet-fast prepare --add_index`"
        )
    return True
