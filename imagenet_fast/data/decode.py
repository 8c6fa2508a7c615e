"""Decoding, cropping and resizing of JPEGs and PNGs by TensorFlow's ops.

Of a JPEG only the crop is decoded (``decode_and_crop_jpeg``); PNGs are decoded whole. Greyscale
images get three equal channels. Resized pixels are rounded to uint8, as by Pillow, which makes the
transfer to the accelerator a quarter of float32's.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data.augmentation.augment import flip
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes
from imagenet_fast.data.headers import check_header, check_scans, is_jpeg
from imagenet_fast.data.pixel_options import PixelOptions

# Blended with white at a time, so that a large PNG needs little memory beyond its pixels.
_PIXELS_AT_ONCE = 2**20


def decode_crop_and_resize(
    encoded: tf.Tensor, box: tf.Tensor, options: PixelOptions, flipped: tf.Tensor | None = None
) -> tf.Tensor:
    """Decodes a crop of an image and resizes it.

    Args:
      encoded: bytes of the JPEG or PNG, a string scalar.
      box: int32 [4]: top, left, height, width.
      options: gives ``image_size``, ``resize_method``, ``antialias`` and ``max_pixels``.
      flipped: bool scalar, whether to flip the crop left to right.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    return resize(decode_crop(encoded, box, options), options, flipped)


def evaluation_image(encoded: tf.Tensor, options: PixelOptions) -> tf.Tensor:
    """Decodes an image and resizes its centre, as evaluation does, for exported models.

    It uses TensorFlow's ops only, and accepts images that did not go through ``imagenet-fast
    prepare``: transparent pixels of PNGs become white here, as they do there.

    Args:
      encoded: bytes of the JPEG or PNG, a string scalar.
      options: gives the crop, the size, how to resize, and ``max_pixels``.

    Returns:
      uint8 [image_size, image_size, 3].

    Raises:
      tf.errors.InvalidArgumentError: at run time, if it is not a whole JPEG or PNG, or too large.
    """
    encoded, size = check_header(encoded, options.max_pixels)
    box = evaluation_crop_boxes(size[tf.newaxis], options)[0]
    image = tf.cond(
        is_jpeg(encoded),
        lambda: _decode_jpeg(check_scans(encoded), box),
        lambda: decode_png_on_white(encoded, box),
    )
    return resize(image, options)


def decode_crop(encoded: tf.Tensor, box: tf.Tensor, options: PixelOptions) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``box``."""

    def png() -> tf.Tensor:
        checked, _ = check_header(encoded, options.max_pixels)
        return _decode_png(checked, box, channels=3)

    return tf.cond(is_jpeg(encoded), lambda: _decode_jpeg(encoded, box), png)


def _decode_png(encoded: tf.Tensor, box: tf.Tensor, channels: int) -> tf.Tensor:
    image = tf.io.decode_png(encoded, channels=channels)
    return tf.slice(image, [box[0], box[1], 0], [box[2], box[3], channels])


def decode_png_on_white(encoded: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``box``, int32 [4]; transparent pixels are white."""
    pixels = _decode_png(encoded, box, channels=4)
    # To opaque pixels of 1, 2 or 4 bits TensorFlow adds an alpha of that depth's largest value.
    bits = tf.io.decode_raw(tf.strings.substr(encoded, 24, 1), tf.uint8)[0]
    largest = tf.bitwise.left_shift(tf.constant(1, tf.uint8), bits) - 1
    opaque = tf.reduce_all(pixels[..., 3] == tf.where(bits < 8, largest, 255))
    return tf.cond(opaque, lambda: pixels[..., :3], lambda: _on_white(pixels))


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Blends uint8 [height, width, 4] with white, some rows at a time: uint8 [height, width, 3]."""
    height, width = tf.unstack(tf.shape(pixels)[:2])
    rows = tf.maximum(_PIXELS_AT_ONCE // width, 1)

    def blend(number: tf.Tensor, blended: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        part = tf.cast(pixels[number * rows : (number + 1) * rows], tf.uint16)
        colors, alpha = part[..., :3], part[..., 3:]
        # Rounded to the nearest, as by Pillow. No intermediate value exceeds 2**16.
        white = (colors * alpha + 255 * (255 - alpha) + 127) // 255
        return number + 1, blended.write(number, tf.cast(white, tf.uint8))

    parts = -(-height // rows)
    blended = tf.TensorArray(tf.uint8, parts, infer_shape=False, element_shape=[None, None, 3])
    _, blended = tf.while_loop(lambda number, _: number < parts, blend, [0, blended])
    return blended.concat()


def _decode_jpeg(encoded: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    return tf.image.decode_and_crop_jpeg(encoded, box, channels=3, dct_method="INTEGER_ACCURATE")


def resize(image: tf.Tensor, options: PixelOptions, flipped: tf.Tensor | None = None) -> tf.Tensor:
    """Resizes an image, uint8 [height, width, 3], and flips it left to right if ``flipped``.

    Returns:
      uint8 [image_size, image_size, 3], rounded to the nearest.
    """
    size = [options.image_size, options.image_size]
    resized = tf.image.resize(
        image, size, method=options.resize_method, antialias=options.antialias
    )
    resized += 0.5
    if options.resize_method == "bicubic":  # overshoots at edges
        resized = tf.clip_by_value(resized, 0.0, 255.0)
    resized = tf.ensure_shape(tf.cast(resized, tf.uint8), [*size, 3])
    return resized if flipped is None else flip(resized, flipped)
