"""From encoded images to uint8 pixels of the size that the model sees, inside a TensorFlow graph.

JPEGs are decoded only where the window lies (``decode_and_crop_jpeg``), PNGs whole; there are no
other formats. Grey images get three equal channels. Pixels are rounded to uint8 after resizing, as
PIL does, so that a quarter of the bytes goes to the accelerator.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from imagenet_fast.data import resize_op
from imagenet_fast.data.augment import flip
from imagenet_fast.data.headers import check_header, is_jpeg
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.windows import evaluation_windows

_DCT_METHODS = {"accurate": "INTEGER_ACCURATE", "fast": "INTEGER_FAST"}
# By which a JPEG can be decoded smaller.
_JPEG_RATIOS = (1, 2, 4, 8)
# Put on white at once, so that a large PNG takes little memory besides its own pixels.
_PIXELS_AT_ONCE = 2**20


def window_image(
    encoded: tf.Tensor, window: tf.Tensor, options: DataOptions, flipped: tf.Tensor | None = None
) -> tf.Tensor:
    """Decodes a window of an image and resizes it.

    Args:
      encoded: bytes of the image, a string scalar.
      window: int32 [4]: top, left, height, width.
      options: gives ``image_size``, ``resize_method``, ``antialias`` and ``resize_kernel``.
      flipped: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    return resize(decode_window(encoded, window, options), options, flipped)


def evaluation_image(encoded: tf.Tensor, options: DataOptions) -> tf.Tensor:
    """Decodes an image and takes its centre, as evaluation does, but by TensorFlow's ops alone.

    The image may come from anywhere: what is transparent in a PNG becomes white, as it does in
    ``imagenet-fast prepare``, for which reason training need not look for it.

    Args:
      encoded: bytes of the image, a string scalar.
      options: gives ``eval_crop_fraction``, ``image_size``, ``max_pixels``, ``resize_method`` and
        ``antialias``.

    Returns:
      uint8 [image_size, image_size, 3].

    Raises:
      tf.errors.InvalidArgumentError: in the graph, if it is no whole JPEG or PNG, or too large.
    """
    encoded, size = check_header(encoded, options.max_pixels)
    window = evaluation_windows(size[tf.newaxis], options)[0]
    image = tf.cond(
        is_jpeg(encoded),
        lambda: _decode_jpeg(encoded, window, options),
        lambda: _decode_png_on_white(encoded, window),
    )
    return resize(image, options.replace(resize_kernel="tensorflow"))


def decode_window(encoded: tf.Tensor, window: tf.Tensor, options: DataOptions) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``window``, or a fraction of it that is large enough."""

    def png() -> tf.Tensor:
        checked, _ = check_header(encoded, options.max_pixels)
        return _decode_png(checked, window, channels=3)

    return tf.cond(is_jpeg(encoded), lambda: _decode_jpeg(encoded, window, options), png)


def _decode_png(encoded: tf.Tensor, window: tf.Tensor, channels: int) -> tf.Tensor:
    image = tf.io.decode_png(encoded, channels=channels)
    return tf.slice(image, [window[0], window[1], 0], [window[2], window[3], channels])


def _decode_png_on_white(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    pixels = _decode_png(encoded, window, channels=4)
    # The alpha that TensorFlow adds to pixels of 1, 2 or 4 bits is the greatest of so many bits.
    bits = tf.io.decode_raw(tf.strings.substr(encoded, 24, 1), tf.uint8)[0]
    added = tf.where(bits < 8, tf.bitwise.left_shift(tf.constant(1, tf.uint8), bits) - 1, 255)
    opaque = tf.reduce_all(pixels[..., 3] == added)
    return tf.cond(opaque, lambda: pixels[..., :3], lambda: _on_white(pixels))


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of uint8 [height, width, 4], some rows at a time."""
    height, width = tf.unstack(tf.shape(pixels)[:2])
    rows = tf.maximum(_PIXELS_AT_ONCE // width, 1)

    def blend(number: tf.Tensor, blended: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        part = tf.cast(pixels[number * rows : (number + 1) * rows], tf.uint16)
        colours, alpha = part[..., :3], part[..., 3:]
        # To the nearest, as Pillow does. No sum is above 2**16.
        white = (colours * alpha + 255 * (255 - alpha) + 127) // 255
        return number + 1, blended.write(number, tf.cast(white, tf.uint8))

    parts = -(-height // rows)
    blended = tf.TensorArray(tf.uint8, parts, infer_shape=False, element_shape=[None, None, 3])
    _, blended = tf.while_loop(lambda number, _: number < parts, blend, [0, blended])
    return blended.concat()


def _decode_jpeg(encoded: tf.Tensor, window: tf.Tensor, options: DataOptions) -> tf.Tensor:
    def decode_at(ratio: int) -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(
            encoded,
            window if ratio == 1 else _scaled(window, ratio),
            channels=3,
            ratio=ratio,
            fancy_upscaling=options.jpeg_upsampling == "smooth",
            dct_method=_DCT_METHODS[options.jpeg_dct],
        )

    if not options.jpeg_scaling:
        return decode_at(1)
    enough = tf.reduce_min(window[2:]) // options.image_size
    branches = [functools.partial(decode_at, ratio) for ratio in _JPEG_RATIOS]
    largest = tf.reduce_sum(tf.cast(enough >= _JPEG_RATIOS[1:], tf.int32))
    return tf.switch_case(largest, branches)


def _scaled(window: tf.Tensor, ratio: int) -> tf.Tensor:
    """Returns a window in pixels of a smaller image, its edges rounded to the nearest."""
    first = (window[:2] + ratio // 2) // ratio
    last = (window[:2] + window[2:] + ratio // 2) // ratio
    return tf.concat([first, last - first], 0)


def resize(image: tf.Tensor, options: DataOptions, flipped: tf.Tensor | None = None) -> tf.Tensor:
    """Resizes an image.

    Args:
      image: uint8 [height, width, 3].
      options: gives ``image_size``, ``resize_method``, ``antialias`` and ``resize_kernel``, whose
        ``auto`` is TensorFlow's here: see :func:`resize_op.with_resize_kernel`.
      flipped: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    if options.resize_kernel == "native":
        sides = False if flipped is None else flipped
        return resize_op.resize(
            image, options.image_size, options.resize_method, sides, options.antialias
        )
    size = [options.image_size, options.image_size]
    resized = tf.image.resize(
        image, size, method=options.resize_method, antialias=options.antialias
    )
    resized += 0.5
    if options.resize_method == "bicubic":  # which overshoots at edges
        resized = tf.clip_by_value(resized, 0.0, 255.0)
    resized = tf.ensure_shape(tf.cast(resized, tf.uint8), [*size, 3])
    return resized if flipped is None else flip(resized, flipped)
