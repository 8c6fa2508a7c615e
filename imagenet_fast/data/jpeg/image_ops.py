"""Native ops that read the examples of a batch of records, and make the batch's images.

Each does a whole batch at once: TensorFlow's datasets pay for every tensor and every element.
``image_ops.cc`` is compiled at first use. It decodes crops of indexed JPEGs itself where it can,
others by functions of TensorFlow, to the same bits.
"""

from __future__ import annotations

import pathlib
from types import ModuleType
from typing import NamedTuple, TypeVar

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.pixel_options import PixelOptions
from imagenet_fast.data.shards import load_record_op

_Options = TypeVar("_Options", bound=PixelOptions)
_FOLDER = pathlib.Path(__file__).parent
_FILES = tuple(
    _FOLDER / name
    for name in (
        "image_ops.cc",
        "always_inline.h",
        "buffer.h",
        "example.h",
        "idct.h",
        "jpeg_cut.cc",
        "jpeg_cut.h",
        "jpeg_index.cc",
        "jpeg_index.h",
        "jpeg_scan.h",
        "jpeg_window.cc",
        "jpeg_window.h",
        "pool.h",
        "resize.cc",
        "resize.h",
        "rgb.h",
        "vector.h",
    )
)


class Examples(NamedTuple):
    """What records of a batch say.

    Attributes:
      records: bytes of the records, string [images].
      places: where their image and its index are, int64 [images, 4]: begin and size of each.
      labels: as stored, int64 [images]; 0 if they are not read.
      sizes: heights and widths, int32 [images, 2].
    """

    records: tf.Tensor
    places: tf.Tensor
    labels: tf.Tensor
    sizes: tf.Tensor


def load_image_ops() -> ModuleType:
    """Returns the ops, after compiling them at the first call.

    Raises:
      OSError: if they cannot be compiled or loaded; the message gives the reason.
    """
    return load_ops(*_FILES)


def with_resize_kernel(options: _Options) -> _Options:
    """Returns the options with ``resize_kernel`` resolved to ``native`` or ``tensorflow``.

    ``auto`` becomes ``native``, or ``tensorflow`` with a warning if the ops cannot be compiled.

    Raises:
      UserError: if ``resize_kernel=native`` and the ops cannot be compiled or loaded.
    """
    if options.resize_kernel == "tensorflow":
        return options
    try:
        load_image_ops()
        load_record_op()
    except OSError as error:
        if options.resize_kernel == "native":
            raise UserError(f"resize_kernel=native is unavailable: {error}") from error
        warn_once(
            "resize_kernel=auto makes images by TensorFlow's slower ops, without JPEG indexes: "
            f"{error}"
        )
        return options.replace(resize_kernel="tensorflow")
    return options.replace(resize_kernel="native")


def read_examples(
    records: tf.Tensor,
    *,
    with_index: bool,
    from_headers: bool,
    max_pixels: int,
    with_label: bool = True,
) -> Examples:
    """Reads records of one image each.

    Args:
      records: serialized ``tf.train.Example``, string [images].
      with_index: whether to look for JPEG indexes.
      from_headers: whether sizes are those of the images' headers; otherwise they are those of the
        records, or if one record has none, those of all headers.
      max_pixels: maximum height times width in a header.
      with_label: whether to read labels, of which each record must have one; otherwise any number.

    Raises:
      tf.errors.InvalidArgumentError: at run time, if one has not the usual fields, each once; or
        with ``from_headers``, if one image is not a JPEG or PNG, too large, or a CMYK JPEG.
    """
    labels, sizes, places = load_image_ops().imagenet_fast_read_examples(
        records=records,
        with_label=with_label,
        with_index=with_index,
        from_headers=from_headers,
        max_pixels=max_pixels,
    )
    (images,) = records.shape
    return Examples(
        records,
        tf.ensure_shape(places, [images, 4]),
        tf.ensure_shape(labels, [images]),
        tf.ensure_shape(sizes, [images, 2]),
    )


def make_images(
    records: tf.Tensor,
    places: tf.Tensor,
    boxes: tf.Tensor,
    flipped: tf.Tensor,
    *,
    options: PixelOptions,
    threads: int = 1,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes crops of a batch's images, resizes them, and flips them left to right.

    Pixels are those of ``decode.decode_crop_and_resize``, or with an index those of the whole
    image, decoded and then cropped.

    Args:
      records: of :class:`Examples`.
      places: likewise.
      boxes: int32 [images, 4]: top, left, height and width.
      flipped: whether to flip, bool [images].
      options: gives ``image_size``, ``resize_method``, ``antialias`` and ``max_pixels`` of PNGs.
      threads: how many make the images.

    Returns:
      uint8 [images, image_size, image_size, 3], and which images' indexes are damaged or of another
      image, bool [images].

    Raises:
      tf.errors.InvalidArgumentError: at run time, if one cannot be decoded or lacks its box.
    """
    images, misfits = load_image_ops().imagenet_fast_make_images(
        records=records,
        places=places,
        boxes=boxes,
        flipped=flipped,
        size=options.image_size,
        threads=threads,
        method=options.resize_method,
        antialias=options.antialias,
        max_pixels=options.max_pixels,
    )
    (count,) = records.shape
    size = options.image_size
    return tf.ensure_shape(images, [count, size, size, 3]), tf.ensure_shape(misfits, [count])
