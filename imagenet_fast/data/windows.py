"""Which part of an image is seen: the windows of a whole batch at once, from its sizes alone."""

from __future__ import annotations

import math

import tensorflow as tf

from imagenet_fast.data import stateless_random
from imagenet_fast.data.options import DataOptions

# Width by height of a crop.
_RATIOS = (3 / 4, 4 / 3)
# Of the image, by an inception crop.
_LEAST_SHOWN = 0.1


def training_windows(sizes: tf.Tensor, identities: tf.Tensor, options: DataOptions) -> tf.Tensor:
    """Draws the windows of training images, as ``options.train_crop`` says.

    Args:
      sizes: int32 [images, 2]: their heights and widths.
      identities: int64 [images, 3], as :func:`stateless_random.uniform` takes them.
      options: gives ``train_crop`` and its options.

    Returns:
      int32 [images, 4]: top, left, height and width of each.
    """
    draw_windows = _DRAW_WINDOWS.get(options.train_crop)
    if not draw_windows:
        return evaluation_windows(sizes, options)
    numbers = stateless_random.uniform(identities, "crop", 4 * options.crop_attempts)
    numbers = tf.reshape(numbers, [-1, 4, options.crop_attempts])
    return draw_windows(sizes, tf.unstack(numbers, axis=1), options)


def evaluation_windows(sizes: tf.Tensor, options: DataOptions) -> tf.Tensor:
    """Returns the windows in the middle that evaluation sees: like :func:`training_windows`."""
    return _centre_windows(sizes, options.eval_crop_fraction)


def _random_resized_windows(
    sizes: tf.Tensor, numbers: list[tf.Tensor], options: DataOptions
) -> tf.Tensor:
    """Draws crop boxes as torchvision's ``RandomResizedCrop`` does.

    The area is a uniform fraction of the image, the ratio of width to height log-uniform in
    [3/4, 4/3]. The first of ``options.crop_attempts`` boxes that fits is taken; if none does, the
    middle of the image, all of it unless its own ratio is beyond those bounds.

    fb.resnet.torch, on which Goyal et al. 2017 build, draws the ratio uniformly, and its inverse
    with even odds.

    Args:
      sizes: int32 [images, 2].
      numbers: four of float32 [images, attempts].
      options: gives ``crop_min_area``.
    """
    areas, ratios, tops, lefts = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    fraction = options.crop_min_area + (1 - options.crop_min_area) * areas
    area = fraction * height * width
    low, high = map(math.log, _RATIOS)
    ratio = tf.exp(low + (high - low) * ratios)
    heights, widths = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
    seen = tf.logical_and(heights >= 1, widths >= 1)
    fits = tf.logical_and(heights <= height, widths <= width)
    windows = place_boxes(height, width, heights, widths, tops, lefts)
    return first_that_fits(windows, seen & fits, _middle_windows(sizes))


def _inception_windows(
    sizes: tf.Tensor, numbers: list[tf.Tensor], options: DataOptions
) -> tf.Tensor:
    """Draws windows as Google's code for TPUs does, and MLPerf's reference code.

    The algorithm is that of TensorFlow's ``sample_distorted_bounding_box``, for all images at once.
    The ratio of width to height is uniform in [3/4, 4/3] (MLPerf's: 1.33), and so is the height
    between its bounds, which makes small areas more likely than large ones. Windows below a tenth
    of the image fail, whatever ``options.crop_min_area``: that code wants to see a tenth of an
    object, and takes the whole image for the object (MLPerf's: where none is marked). If all of
    ``options.crop_attempts`` fail, evaluation's window is taken (MLPerf's: the whole image).

    Args:
      sizes: int32 [images, 2].
      numbers: four of float32 [images, attempts].
      options: gives ``crop_min_area`` and ``eval_crop_fraction``.
    """
    ratios, shares, tops, lefts = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    least, most = options.crop_min_area * height * width, height * width
    low, high = _RATIOS
    ratio = low + (high - low) * ratios
    lowest = tf.round(tf.sqrt(least / ratio))
    highest = tf.round(tf.sqrt(most / ratio))
    widest = tf.floor((width + 0.5 - 1e-7) / ratio)
    widest -= tf.cast(tf.round(widest * ratio) > width, tf.float32)
    highest = tf.where(tf.round(highest * ratio) > width, widest, highest)
    highest = tf.minimum(highest, height)
    lowest = tf.minimum(lowest, highest)
    heights = lowest + tf.floor(shares * (highest - lowest + 1))
    # Rounding may have left the bounds.
    heights += tf.cast(heights * tf.round(heights * ratio) < least, tf.float32)
    heights -= tf.cast(heights * tf.round(heights * ratio) > most, tf.float32)
    widths = tf.round(heights * ratio)
    areas = heights * widths
    within = tf.logical_and(heights <= height, widths <= width)
    allowed = tf.logical_and(areas >= tf.maximum(least, _LEAST_SHOWN * most), areas <= most)
    seen = tf.logical_and(heights >= 1, widths >= 1)
    windows = place_boxes(height, width, heights, widths, tops, lefts)
    fallback = evaluation_windows(sizes, options)
    chosen = first_that_fits(windows, within & allowed & seen, fallback)
    # As Google's code does, which knows of no other sign of failure than the whole image.
    failed = tf.reduce_all(chosen[:, 2:] == sizes, axis=1, keepdims=True)
    return tf.where(failed, fallback, chosen)


_DRAW_WINDOWS = {"random_resized": _random_resized_windows, "inception": _inception_windows}


def place_boxes(
    height: tf.Tensor,
    width: tf.Tensor,
    heights: tf.Tensor,
    widths: tf.Tensor,
    tops: tf.Tensor,
    lefts: tf.Tensor,
) -> tf.Tensor:
    """Returns boxes, int32 [images, attempts, 4], anywhere in an image.

    Args:
      height: of the images, float32, to be broadcast against the boxes'.
      width: likewise.
      heights: of the boxes, float32 [images, attempts].
      widths: likewise.
      tops: uniform in [0, 1), float32 [images, attempts].
      lefts: likewise.
    """
    top = tf.floor(tops * (height - heights + 1))
    left = tf.floor(lefts * (width - widths + 1))
    return tf.cast(tf.stack([top, left, heights, widths], axis=-1), tf.int32)


def first_that_fits(windows: tf.Tensor, fits: tf.Tensor, fallback: tf.Tensor) -> tf.Tensor:
    """Returns the first box of each image that fits, int32 [images, 4].

    Args:
      windows: boxes, int32 [images, attempts, 4].
      fits: bool [images, attempts].
      fallback: int32 [images, 4], taken where none fits.
    """
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1)
    chosen = tf.gather(windows, first, axis=1, batch_dims=1)
    return tf.where(tf.reduce_any(fits, axis=1, keepdims=True), chosen, fallback)


def _middle_windows(sizes: tf.Tensor) -> tf.Tensor:
    """Returns the largest boxes in the middle whose ratio of width to height is in bounds."""
    height, width = tf.unstack(tf.cast(sizes, tf.float32), axis=1)
    low, high = _RATIOS
    heights = tf.cast(tf.minimum(height, tf.round(width / low)), tf.int32)
    widths = tf.cast(tf.minimum(width, tf.round(height * high)), tf.int32)
    inner = tf.stack([heights, widths], axis=1)
    return tf.concat([(sizes - inner) // 2, inner], axis=1)


def _centre_windows(sizes: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the squares in the middle, ``fraction`` of the shorter side wide."""
    shorter = tf.cast(tf.reduce_min(sizes, axis=1, keepdims=True), tf.float32)
    side = tf.maximum(tf.cast(tf.round(fraction * shorter), tf.int32), 1)
    corners = (sizes - side + 1) // 2
    return tf.concat([corners, side, side], axis=1)
