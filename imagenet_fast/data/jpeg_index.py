"""Native ops that index JPEGs, and that cut crops out of JPEGs with the help of the index.

A crop of an image then costs no more than decoding the blocks around it. ``jpeg_index.h`` describes
how that works and the format of an index; ``jpeg_ops.cc`` is compiled at first use.
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

# Of smaller images, on average, a crop is decoded faster than it is cut out and decoded.
LEAST_PIXELS = 200 * 200

_warned = threading.Event()
_FOLDER = pathlib.Path(__file__).parent
_FILES = tuple(_FOLDER / name for name in ("jpeg_ops.cc", "jpeg_index.cc", "jpeg_index.h"))


def load_jpeg_ops() -> ModuleType:
    """Compiles the ops, unless that has been done, and returns them.

    Raises:
      OSError: if they cannot be compiled or loaded; the message gives the reason.
    """
    return load_ops(*_FILES)


def index_file(encoded: bytes, height: int, width: int) -> bytes | None:
    """Returns the index of an image file.

    Args:
      encoded: bytes of the file.
      height: of the image, in pixels.
      width: likewise.

    Returns:
      Its index; empty for JPEGs that have none; None for PNGs and small images, which need none.

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
      Strings of the same shape. Empty for files that have no index: damaged ones, and all that are
      not sequential, Huffman-coded, 8-bit, grey or of 3 components, and one scan.

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
      indexes: their indexes, string [images]; empty where there is none.
      boxes: int32 [images, 4]: top, left, height and width, in pixels.
      scales: int32 [images]: 1, 2, 4 or 8; the cuts will be decoded at 1/scale of their size.
      warn: whether to warn once if indexes do not fit their images. This calls Python, which
        TensorFlow graphs that run in other processes cannot.

    Returns:
      The cuts, which are JPEGs, string [images]; the boxes in them, int32 [images, 4]; and which
      images were cut, bool [images]. A decoded cut's pixels inside of its box are bit-equal to
      those of the whole image. Images that cannot be cut, because their index is empty, damaged or
      another file's, or their box is not inside of the image, stay as they are.

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
            f"jpeg_index: in a batch of {misfits.size}, {misfits.sum()} JPEGs do not match their "
            "indexes, as after re-encoding, and are decoded more slowly: replace the indexes with "
            "`imagenet-fast prepare --add_index`"
        )
    return True
