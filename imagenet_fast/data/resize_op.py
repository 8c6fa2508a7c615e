"""Resizing by an op of our own, to the bit as TensorFlow's ops do it, but several times faster.

``resize_op.cc`` is compiled by :mod:`~imagenet_fast.base.native_ops`, which needs a C++ compiler.
"""

from __future__ import annotations

import pathlib
from typing import TypeVar

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.options import DataOptions

_Options = TypeVar("_Options", bound=DataOptions)
_SOURCE = pathlib.Path(__file__).with_suffix(".cc")


def with_resize_kernel(options: _Options) -> _Options:
    """Returns the options with the ``resize_kernel`` that pipelines of this process take.

    That is the native one, unless TensorFlow's is asked for or ``auto`` cannot have it, which is
    then told.

    Raises:
      UserError: if the native one is asked for and cannot be had.
    """
    if options.resize_kernel == "tensorflow":
        return options
    try:
        load_ops(_SOURCE)
    except OSError as error:
        if options.resize_kernel == "native":
            raise UserError(f"resize_kernel=native cannot be had: {error}") from error
        warn_once(f"resize_kernel: TensorFlow's, which is slower, since {error}")
        return options.replace(resize_kernel="tensorflow")
    return options.replace(resize_kernel="native")


def resize(
    image: tf.Tensor,
    size: int,
    method: str,
    flipped: tf.Tensor | bool,
    antialias: bool = False,
) -> tf.Tensor:
    """Resizes an image with the native kernel.

    Args:
      image: uint8 [height, width, 3].
      size: height and width of the result.
      method: ``bilinear`` or ``bicubic``.
      flipped: whether left and right change places; a bool scalar.
      antialias: whether the filter becomes wider as the image becomes smaller.

    Returns:
      uint8 [size, size, 3], rounded to the nearest and clipped to 0..255.

    Raises:
      OSError: if there is no such kernel here.
    """
    resized = load_ops(_SOURCE).imagenet_fast_resize(
        image=image, flipped=flipped, size=size, method=method, antialias=antialias
    )
    return tf.ensure_shape(resized, [size, size, 3])
