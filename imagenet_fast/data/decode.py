"""From encoded images to uint8 pixels of the size that the model sees, inside a TensorFlow graph.

JPEGs are decoded only where the window lies (``decode_and_crop_jpeg``); PNG, GIF and BMP are
decoded whole. Grey images get three equal channels. Pixels are rounded to uint8 after resizing, as
PIL does, so that a quarter of the bytes goes to the accelerator.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data import resize_op
from imagenet_fast.data.augment import mirror
from imagenet_fast.data.images import PNG_SIGNATURE
from imagenet_fast.data.windows import evaluation_windows

_DCT_METHODS = {"accurate": "INTEGER_ACCURATE", "fast": "INTEGER_FAST"}
# By which a JPEG can be decoded smaller.
_JPEG_RATIOS = (1, 2, 4, 8)


def window_image(
    encoded: tf.Tensor, window: tf.Tensor, config: Config, mirrored: tf.Tensor | None = None
) -> tf.Tensor:
    """Decodes a window of an image and resizes it.

    Args:
      encoded: bytes of the image, a string scalar.
      window: int32 [4]: top, left, height, width.
      config: gives ``image_size``, ``resize_method`` and ``resize_kernel``.
      mirrored: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    return resize(decode_window(encoded, window, config), config, mirrored)


def evaluation_image(encoded: tf.Tensor, config: Config) -> tf.Tensor:
    """Decodes an image and takes its centre, as evaluation does, but by TensorFlow's ops alone.

    The image may come from anywhere: what is transparent in a PNG becomes white, as it does in
    ``imagenet-fast prepare``, for which reason training need not look for it.

    Args:
      encoded: bytes of the image, a string scalar.
      config: gives ``eval_crop_fraction``, ``image_size`` and ``resize_method``.

    Returns:
      uint8 [image_size, image_size, 3].
    """

    def centre(size: tf.Tensor) -> tf.Tensor:
        return evaluation_windows(size[tf.newaxis, :2], config)[0]

    def jpeg() -> tf.Tensor:
        return _decode_jpeg(encoded, centre(tf.image.extract_jpeg_shape(encoded)), config)

    def other() -> tf.Tensor:
        image = tf.cond(
            tf.strings.substr(encoded, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE,
            lambda: _decode_png_on_white(encoded),
            lambda: _decode_whole(encoded),
        )
        return _cut(image, centre(tf.shape(image)))

    image = tf.cond(_is_jpeg(encoded), jpeg, other)
    return resize(image, config.replace(resize_kernel="tensorflow"))


def image_size(encoded: tf.Tensor) -> tf.Tensor:
    """Returns int32 [height, width], from the header alone if the image is a JPEG."""
    size = tf.cond(
        _is_jpeg(encoded),
        lambda: tf.image.extract_jpeg_shape(encoded)[:2],
        lambda: tf.shape(_decode_whole(encoded))[:2],
    )
    return tf.ensure_shape(size, [2])


def _is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, 3) == b"\xff\xd8\xff"


def decode_window(encoded: tf.Tensor, window: tf.Tensor, config: Config) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``window``, or a fraction of it that is large enough."""
    return tf.cond(
        _is_jpeg(encoded),
        lambda: _decode_jpeg(encoded, window, config),
        lambda: _cut(_decode_whole(encoded), window),
    )


def _decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _decode_png_on_white(encoded: tf.Tensor) -> tf.Tensor:
    pixels = tf.cast(tf.io.decode_png(encoded, channels=4), tf.int32)
    colours, alpha = pixels[..., :3], pixels[..., 3:]
    # The alpha that TensorFlow adds to pixels of 1, 2 or 4 bits is the greatest of so many bits.
    bits = tf.io.decode_raw(tf.strings.substr(encoded, 24, 1), tf.uint8)[0]
    opaque = tf.reduce_all(alpha == 2 ** tf.cast(bits, tf.int32) - 1)
    alpha = tf.where(opaque, 255, alpha)
    # To the nearest, as Pillow does.
    return tf.cast((colours * alpha + 255 * (255 - alpha) + 127) // 255, tf.uint8)


def _cut(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    return tf.slice(image, [window[0], window[1], 0], [window[2], window[3], 3])


def _decode_jpeg(encoded: tf.Tensor, window: tf.Tensor, config: Config) -> tf.Tensor:
    def decode_at(ratio: int) -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(
            encoded,
            window if ratio == 1 else _scaled(window, ratio),
            channels=3,
            ratio=ratio,
            fancy_upscaling=config.jpeg_upsampling == "smooth",
            dct_method=_DCT_METHODS[config.jpeg_dct],
        )

    if not config.jpeg_scaling:
        return decode_at(1)
    enough = tf.reduce_min(window[2:]) // config.image_size
    branches = [functools.partial(decode_at, ratio) for ratio in _JPEG_RATIOS]
    largest = tf.reduce_sum(tf.cast(enough >= _JPEG_RATIOS[1:], tf.int32))
    return tf.switch_case(largest, branches)


def _scaled(window: tf.Tensor, ratio: int) -> tf.Tensor:
    """Returns a window in pixels of a smaller image, its edges rounded to the nearest."""
    first = (window[:2] + ratio // 2) // ratio
    last = (window[:2] + window[2:] + ratio // 2) // ratio
    return tf.concat([first, last - first], 0)


def resize(image: tf.Tensor, config: Config, mirrored: tf.Tensor | None = None) -> tf.Tensor:
    """Resizes an image.

    Args:
      image: uint8 [height, width, 3].
      config: gives ``image_size``, ``resize_method`` and ``resize_kernel``, of which ``auto`` is
        TensorFlow's here: see :func:`resize_op.with_resize_kernel`.
      mirrored: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    if config.resize_kernel == "native":
        sides = False if mirrored is None else mirrored
        return resize_op.resize(image, config.image_size, config.resize_method, sides)
    size = [config.image_size, config.image_size]
    resized = tf.image.resize(image, size, method=config.resize_method) + 0.5
    if config.resize_method == "bicubic":  # which overshoots at edges
        resized = tf.clip_by_value(resized, 0.0, 255.0)
    resized = tf.ensure_shape(tf.cast(resized, tf.uint8), [*size, 3])
    return resized if mirrored is None else mirror(resized, mirrored)
