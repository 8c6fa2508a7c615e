"""Crop boxes for training and evaluation, for a batch of images at once, from their sizes.

Sizes are int32 [images, 2], heights and widths; boxes are int32 [images, 4]: top, left, height and
width.
"""

from __future__ import annotations

import math

import tensorflow as tf

from imagenet_fast.data.augmentation import stateless_random
from imagenet_fast.data.augmentation.options import AugmentationOptions
from imagenet_fast.data.pixel_options import PixelOptions

# Bounds of a random crop's width divided by its height.
_ASPECT_RATIOS = (3 / 4, 4 / 3)
# The smallest fraction of the image that an inception crop may cover.
_MIN_COVERED = 0.1


def training_crop_boxes(
    sizes: tf.Tensor, identities: tf.Tensor, options: AugmentationOptions
) -> tf.Tensor:
    """Returns the crop boxes of training images by ``options.train_crop``.

    They are drawn for identities, int64 [images, 3], the keys of :func:`stateless_random.uniform`.
    """
    draw_boxes = _DRAW_BOXES.get(options.train_crop)
    if not draw_boxes:
        return evaluation_crop_boxes(sizes, options)
    numbers = stateless_random.uniform(identities, "crop", 4 * options.crop_attempts)
    numbers = tf.reshape(numbers, [-1, 4, options.crop_attempts])
    return draw_boxes(sizes, tf.unstack(numbers, axis=1), options)


def evaluation_crop_boxes(sizes: tf.Tensor, options: PixelOptions) -> tf.Tensor:
    """Returns evaluation's central crops."""
    if options.eval_crop == "proportional":
        return _proportional_centres(sizes, options.eval_crop_fraction)
    return _centre_squares(sizes, options.eval_crop_fraction)


def _random_resized_boxes(
    sizes: tf.Tensor, numbers: list[tf.Tensor], options: AugmentationOptions
) -> tf.Tensor:
    """Draws crop boxes as torchvision's ``RandomResizedCrop`` does.

    The area is a uniform fraction of the image's, and the aspect ratio log-uniform in [3/4, 4/3].
    Of ``options.crop_attempts`` boxes, the first that fits is used. If none fits, the fallback is
    the largest central box with an aspect ratio in these bounds.

    fb.resnet.torch, the code base of Goyal et al. 2017, draws the aspect ratio uniformly instead,
    and inverts it with probability 1/2.
    """
    areas, ratios, tops, lefts = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    fraction = options.crop_min_area + (1 - options.crop_min_area) * areas
    area = fraction * height * width
    low, high = map(math.log, _ASPECT_RATIOS)
    ratio = tf.exp(low + (high - low) * ratios)
    heights, widths = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
    seen = tf.logical_and(heights >= 1, widths >= 1)
    fits = tf.logical_and(heights <= height, widths <= width)
    boxes = place_boxes(height, width, heights, widths, tops, lefts)
    return first_that_fits(boxes, seen & fits, _largest_centre_boxes(sizes))


def _inception_boxes(
    sizes: tf.Tensor, numbers: list[tf.Tensor], options: AugmentationOptions
) -> tf.Tensor:
    """Draws crop boxes as Google's TPU code and the MLPerf reference code do.

    The algorithm is that of TensorFlow's ``sample_distorted_bounding_box``, vectorized. The aspect
    ratio is uniform in [3/4, 4/3] (MLPerf: up to 1.33), and the height uniform between its bounds,
    which makes small areas more likely than large ones. Boxes below a tenth of the image fail
    whatever ``options.crop_min_area`` is: those code bases set ``min_object_covered=0.1`` and use
    the whole image as the object (MLPerf: if it has no bounding box). If all
    ``options.crop_attempts`` fail, the box is evaluation's (MLPerf: the whole image).
    """
    ratios, fractions, tops, lefts = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    least, most = options.crop_min_area * height * width, height * width
    low, high = _ASPECT_RATIOS
    ratio = low + (high - low) * ratios
    lowest = tf.round(tf.sqrt(least / ratio))
    highest = tf.round(tf.sqrt(most / ratio))
    widest = tf.floor((width + 0.5 - 1e-7) / ratio)
    widest -= tf.cast(tf.round(widest * ratio) > width, tf.float32)
    highest = tf.where(tf.round(highest * ratio) > width, widest, highest)
    highest = tf.minimum(highest, height)
    lowest = tf.minimum(lowest, highest)
    heights = lowest + tf.floor(fractions * (highest - lowest + 1))
    # Rounding may have moved the area out of bounds.
    heights += tf.cast(heights * tf.round(heights * ratio) < least, tf.float32)
    heights -= tf.cast(heights * tf.round(heights * ratio) > most, tf.float32)
    widths = tf.round(heights * ratio)
    areas = heights * widths
    within = tf.logical_and(heights <= height, widths <= width)
    allowed = tf.logical_and(areas >= tf.maximum(least, _MIN_COVERED * most), areas <= most)
    seen = tf.logical_and(heights >= 1, widths >= 1)
    boxes = place_boxes(height, width, heights, widths, tops, lefts)
    fallback = evaluation_crop_boxes(sizes, options)
    chosen = first_that_fits(boxes, within & allowed & seen, fallback)
    # Google's code takes a box of the whole image for a failure, so a drawn one counts as one, too.
    failed = tf.reduce_all(chosen[:, 2:] == sizes, axis=1, keepdims=True)
    return tf.where(failed, fallback, chosen)


# Functions of the sizes, of four random numbers, float32 [images, attempts], and of the options.
_DRAW_BOXES = {"random_resized": _random_resized_boxes, "inception": _inception_boxes}


def place_boxes(
    height: tf.Tensor,
    width: tf.Tensor,
    heights: tf.Tensor,
    widths: tf.Tensor,
    tops: tf.Tensor,
    lefts: tf.Tensor,
) -> tf.Tensor:
    """Returns boxes at uniformly random positions, int32 [images, attempts, 4].

    Args:
      height: of the images, float32, broadcast against the boxes'.
      width: of the images, likewise.
      heights: of the boxes, float32 [images, attempts].
      widths: of the boxes, likewise.
      tops: random numbers, uniform in [0, 1), float32 [images, attempts].
      lefts: likewise.
    """
    top = tf.floor(tops * (height - heights + 1))
    left = tf.floor(lefts * (width - widths + 1))
    return tf.cast(tf.stack([top, left, heights, widths], axis=-1), tf.int32)


def first_that_fits(boxes: tf.Tensor, fits: tf.Tensor, fallback: tf.Tensor) -> tf.Tensor:
    """Returns each image's first of ``boxes``, int32 [images, attempts, 4], that ``fits``.

    ``fallback`` has the boxes, int32 [images, 4], for images with none that fits.
    """
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1)
    chosen = tf.gather(boxes, first, axis=1, batch_dims=1)
    return tf.where(tf.reduce_any(fits, axis=1, keepdims=True), chosen, fallback)


def _largest_centre_boxes(sizes: tf.Tensor) -> tf.Tensor:
    """Returns the largest central boxes with an aspect ratio in :data:`_ASPECT_RATIOS`."""
    height, width = tf.unstack(tf.cast(sizes, tf.float32), axis=1)
    low, high = _ASPECT_RATIOS
    heights = tf.cast(tf.minimum(height, tf.round(width / low)), tf.int32)
    widths = tf.cast(tf.minimum(width, tf.round(height * high)), tf.int32)
    inner = tf.stack([heights, widths], axis=1)
    return tf.concat([(sizes - inner) // 2, inner], axis=1)


def _centre_squares(sizes: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the central squares with ``fraction`` of the shorter side."""
    shorter = tf.cast(tf.reduce_min(sizes, axis=1, keepdims=True), tf.float32)
    side = tf.maximum(tf.cast(tf.round(fraction * shorter), tf.int32), 1)
    corners = (sizes - side + 1) // 2
    return tf.concat([corners, side, side], axis=1)


def _proportional_centres(sizes: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the central boxes with ``fraction`` of both sides, as ``tf.image.central_crop``."""
    lengths = tf.cast(sizes, tf.float64)
    corners = tf.cast((lengths - lengths * fraction) / 2, tf.int32)
    return tf.concat([corners, sizes - 2 * corners], axis=1)
