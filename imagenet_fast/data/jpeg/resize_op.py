"""A native resize op, bit-equal to TensorFlow's resize ops and several times faster.

:mod:`~imagenet_fast.base.native_ops` compiles ``resize_op.cc`` on first use, which needs a C++
compiler.
"""

from __future__ import annotations

import pathlib
from typing import TypeVar

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.jpeg.image_ops import load_image_ops
from imagenet_fast.data.jpeg.index import load_jpeg_ops
from imagenet_fast.data.pixel_options import PixelOptions
from imagenet_fast.data.shards import load_record_op

_Options = TypeVar("_Options", bound=PixelOptions)
_FOLDER = pathlib.Path(__file__).parent
_FILES = tuple(_FOLDER / name for name in ("resize_op.cc", "resize.cc", "resize.h"))


def with_resize_kernel(options: _Options) -> _Options:
    """Returns the options with ``resize_kernel`` resolved to ``native`` or ``tensorflow``.

    ``auto`` becomes ``native``, or ``tensorflow`` with a warning if the op cannot be compiled.

    Raises:
      UserError: if ``resize_kernel=native`` and the op cannot be compiled or loaded.
    """
    if options.resize_kernel == "tensorflow":
        return options
    try:
        load_ops(*_FILES)
        load_jpeg_ops()
        load_image_ops()
        load_record_op()
    except OSError as error:
        if options.resize_kernel == "native":
            raise UserError(f"resize_kernel=native is unavailable: {error}") from error
        warn_once(
            f"resize_kernel=auto uses TensorFlow's slower resize, without JPEG indexes: {error}"
        )
        return options.replace(resize_kernel="tensorflow")
    return options.replace(resize_kernel="native")


def resize(
    image: tf.Tensor,
    size: int,
    method: str,
    flipped: tf.Tensor | bool,
    antialias: bool = False,
    box: tf.Tensor | None = None,
) -> tf.Tensor:
    """Resizes an image, or a part of it, with the native kernel.

    Args:
      image: uint8 [height, width, 3].
      size: height and width of the result.
      method: ``bilinear`` or ``bicubic``.
      flipped: whether to flip the image left to right; a bool scalar.
      antialias: whether to widen the filter when shrinking.
      box: int32 [4]: top, left, height and width of the part; None, or of no elements: all.

    Returns:
      uint8 [size, size, 3], rounded to the nearest and clipped to 0..255.

    Raises:
      OSError: if the op cannot be compiled or loaded.
    """
    resized = load_ops(*_FILES).imagenet_fast_resize(
        image=image,
        flipped=flipped,
        box=tf.zeros([0], tf.int32) if box is None else box,
        size=size,
        method=method,
        antialias=antialias,
    )
    return tf.ensure_shape(resized, [size, size, 3])
