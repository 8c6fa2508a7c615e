"""From encoded images to uint8 pixels of the size that the model sees, inside a TensorFlow graph.

JPEGs are decoded only where the crop lies (``decode_and_crop_jpeg``); PNG, GIF and BMP are decoded
whole. Grey images get three equal channels. Pixels are rounded to uint8 after resizing, as PIL
does, so that a quarter of the bytes goes to the accelerator.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.config import Config

# Width by height: of a random_resized crop the root of this, of an inception crop this itself.
_RATIOS = (3 / 4, 4 / 3)
# Of the image, by an inception crop.
_LEAST_SHOWN = 0.1


def training_image(encoded: tf.Tensor, seed: tf.Tensor, config: Config) -> tf.Tensor:
    """Decodes an image and crops it at random, as ``config.train_crop`` says.

    Args:
      encoded: bytes of the image, a string scalar.
      seed: int32 [2]; the same seed gives the same crop.
      config: gives ``train_crop`` and its options, ``image_size`` and ``resize_method``.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    draw_window = _DRAW_WINDOW.get(config.train_crop)
    if draw_window:
        window = draw_window(_image_size(encoded), seed, config)
        return _resize(_decode(encoded, window), config)
    image = evaluation_image(encoded, config)
    if config.train_crop == "pad":
        margin = config.crop_padding
        padded = tf.pad(image, [[margin, margin], [margin, margin], [0, 0]])
        image = tf.image.stateless_random_crop(padded, image.shape, seed)
    return image


def evaluation_image(encoded: tf.Tensor, config: Config) -> tf.Tensor:
    """Decodes an image and takes its centre; export and evaluation both use this function.

    Args:
      encoded: bytes of the image, a string scalar.
      config: gives ``eval_crop_fraction``, ``image_size`` and ``resize_method``.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    window = _centre_window(_image_size(encoded), config.eval_crop_fraction)
    return _resize(_decode(encoded, window), config)


def _is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, 3) == b"\xff\xd8\xff"


def _image_size(encoded: tf.Tensor) -> tf.Tensor:
    """Returns int32 [height, width], from the header alone if the image is a JPEG."""
    return tf.cond(
        _is_jpeg(encoded),
        lambda: tf.image.extract_jpeg_shape(encoded)[:2],
        lambda: tf.shape(tf.io.decode_image(encoded, channels=3, expand_animations=False))[:2],
    )


def _decode(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``window``: int32 [top, left, height, width]."""

    def other() -> tf.Tensor:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.slice(image, [window[0], window[1], 0], [window[2], window[3], 3])

    return tf.cond(
        _is_jpeg(encoded),
        lambda: tf.image.decode_and_crop_jpeg(encoded, window, channels=3),
        other,
    )


def _random_resized_window(size: tf.Tensor, seed: tf.Tensor, config: Config) -> tf.Tensor:
    """Draws a window as fb.resnet.torch does, on which Goyal et al. 2017 build.

    The area is a uniform fraction of the image; the *root* of the ratio of width to height is
    uniform in [3/4, 4/3], or of height to width, with even odds. The first of
    ``config.crop_attempts`` windows that fits is taken; if none does, the largest square in the
    middle.
    """
    draws = tf.random.stateless_uniform([5, config.crop_attempts], seed)
    image = tf.cast(size, tf.float32)
    fraction = config.crop_min_area + (1 - config.crop_min_area) * draws[0]
    side = tf.sqrt(fraction * tf.reduce_prod(image))
    low, high = _RATIOS
    ratio = low + (high - low) * draws[1]
    wide, narrow = tf.round(side * ratio), tf.round(side / ratio)
    swapped = draws[2] < 0.5
    shapes = tf.stack([tf.where(swapped, wide, narrow), tf.where(swapped, narrow, wide)], axis=1)
    shapes = tf.maximum(shapes, 1)
    corners = tf.floor(tf.transpose(draws[3:]) * (image - shapes + 1))
    fits = tf.reduce_all(shapes <= image, axis=1)
    windows = tf.cast(tf.concat([corners, shapes], axis=1), tf.int32)
    first = tf.argmax(tf.cast(fits, tf.int32))
    return tf.where(tf.reduce_any(fits), windows[first], _centre_window(size, 1.0))


def _inception_window(size: tf.Tensor, seed: tf.Tensor, config: Config) -> tf.Tensor:
    """Draws a window as Google's code for TPUs does, and MLPerf's reference code.

    The ratio of width to height is uniform in [3/4, 4/3] (MLPerf's: 1.33), and so is the height
    between its bounds, which makes small areas more likely than large ones. Windows below a tenth
    of the image fail, whatever ``config.crop_min_area``: that code wants to see a tenth of an
    object, and takes the whole image for the object (MLPerf's: where none is marked). If all of
    ``config.crop_attempts`` fail, evaluation's window is taken (MLPerf's: the whole image).
    """
    corner, shape, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.concat([size, [3]], 0),
        bounding_boxes=[[[0.0, 0.0, 1.0, 1.0]]],
        seed=seed,
        min_object_covered=_LEAST_SHOWN,
        aspect_ratio_range=_RATIOS,
        area_range=(config.crop_min_area, 1.0),
        max_attempts=config.crop_attempts,
    )
    window = tf.concat([corner[:2], shape[:2]], 0)
    # The operation has no other sign of failure than the whole image.
    failed = tf.reduce_all(window[2:] == size)
    return tf.where(failed, _centre_window(size, config.eval_crop_fraction), window)


_DRAW_WINDOW = {"random_resized": _random_resized_window, "inception": _inception_window}


def _centre_window(size: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the square in the middle, ``fraction`` of the shorter side wide."""
    side = tf.cast(tf.round(fraction * tf.cast(tf.reduce_min(size), tf.float32)), tf.int32)
    side = tf.maximum(side, 1)
    corner = (size - side + 1) // 2
    return tf.concat([corner, [side, side]], 0)


def _resize(image: tf.Tensor, config: Config) -> tf.Tensor:
    size = [config.image_size, config.image_size]
    resized = tf.image.resize(image, size, method=config.resize_method)
    image = tf.saturate_cast(tf.round(resized), tf.uint8)
    return tf.ensure_shape(image, [*size, 3])
