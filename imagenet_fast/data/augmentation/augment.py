"""Augmentation of training images: shift, flip, colour changes, cutout, random erasing.

Random numbers are drawn first, for a batch of images at once: for their identities, int64
[images, 3], see :func:`stateless_random.uniform`. The augmentations are deterministic functions of
an image and these numbers. Images are uint8 or float32 [height, width, 3] in 0..255; float32 ones
are returned without clipping.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from imagenet_fast.data.augmentation import auto_augment, stateless_random
from imagenet_fast.data.augmentation.crop_boxes import first_that_fits, place_boxes
from imagenet_fast.data.augmentation.image_operations import apply
from imagenet_fast.data.augmentation.options import AugmentationOptions

Changes = dict[str, tf.Tensor]

# The principal components of ImageNet's colours, scaled to 0..1 (Krizhevsky et al. 2012), with the
# digits of fb.resnet.torch.
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045], np.float32)
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], np.float32
)
_ERASE_ATTEMPTS = 10
_ERASED_AREAS = (0.02, 0.33)
_ERASED_RATIOS = (0.3, 3.3)
# Red, green and blue of Cb and of Cr (ITU-R BT.601).
_RGB_OF_CHROMA = np.array([[0, 1.402], [-0.344136, -0.714136], [1.772, 0]], np.float32)
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def draw_changes(identities: tf.Tensor, options: AugmentationOptions) -> Changes:
    """Draws the augmentation that ``options`` select.

    Returns:
      The changes that :func:`augment` makes in each image, by name: [images, ...].
    """
    changes = {}
    if options.train_crop == "pad":
        numbers = stateless_random.uniform(identities, "shift", 2)
        changes["shift"] = tf.cast(numbers * (2 * options.crop_padding + 1), tf.int32)
    if options.flip:
        changes["flip"] = draw_flips(identities)
    if options.cutout:
        numbers = stateless_random.uniform(identities, "cutout", 2)
        places = options.image_size - options.cutout + 1
        changes["cut"] = tf.cast(numbers * places, tf.int32)
    if options.rand_augment:
        layers, magnitude = options.rand_augment
        changes["operations"], changes["strengths"] = auto_augment.draw_rand_augment(
            identities, int(layers), magnitude
        )
    if options.trivial_augment:
        changes["operations"], changes["strengths"] = auto_augment.draw_trivial_augment(identities)
    if options.color_jitter:
        numbers = stateless_random.uniform(identities, "color jitter", 3)
        changes["jitter"] = 1 + options.color_jitter * (2 * numbers - 1)
    if options.brightness or options.contrast:
        changes["light"] = draw_light(identities, options)
    if options.chroma:
        numbers = stateless_random.uniform(identities, "chroma", 2)
        changes["chroma"] = options.chroma * (2 * numbers - 1)
    if options.lighting:
        # The normal quantile of 0 is infinite. In float32, the last bits would depend on the place
        # in the batch, because TensorFlow vectorizes the computation.
        numbers = tf.maximum(stateless_random.uniform(identities, "lighting", 3), 2.0**-25)
        normal = tf.cast(tf.math.ndtri(tf.cast(numbers, tf.float64)), tf.float32)
        changes["lighting"] = options.lighting * normal
    if options.random_erasing:
        changes["erased"] = draw_erased(identities, options)
    return changes


def draw_flips(identities: tf.Tensor) -> tf.Tensor:
    """Draws which images to flip: bool [images]."""
    return stateless_random.uniform(identities, "flip", 1)[:, 0] < 0.5


def draw_light(identities: tf.Tensor, options: AugmentationOptions) -> tf.Tensor:
    """Draws changes of brightness and contrast, uniform within ``brightness`` and ``contrast``.

    Returns:
      float32 [images, 2]: what is added to normalized pixels, and their factor after that.
    """
    numbers = 2 * stateless_random.uniform(identities, "light", 2) - 1
    return numbers * [options.brightness, options.contrast] + [0.0, 1.0]


def draw_erased(identities: tf.Tensor, options: AugmentationOptions) -> tf.Tensor:
    """Draws the boxes of random erasing (Zhong et al. 2017), as torchvision's ``RandomErasing``.

    The area is uniform in .02 to .33 of the image, the ratio of height to width log-uniform in .3
    to 3.3. Of ten boxes, the first that is smaller than the image is used.

    Returns:
      int32 [images, 4]: top, left, height and width; the height is 0 if nothing is erased.
    """
    chances, numbers = tf.split(
        stateless_random.uniform(identities, "erase", 1 + 4 * _ERASE_ATTEMPTS),
        [1, 4 * _ERASE_ATTEMPTS],
        axis=1,
    )
    numbers = tf.reshape(numbers, [-1, 4, _ERASE_ATTEMPTS])
    areas, ratios, tops, lefts = tf.unstack(numbers, axis=1)
    size = float(options.image_size)
    (least, most), (low, high) = _ERASED_AREAS, np.log(_ERASED_RATIOS).tolist()
    area = size * size * (least + (most - least) * areas)
    ratio = tf.exp(low + (high - low) * ratios)
    heights, widths = tf.round(tf.sqrt(area * ratio)), tf.round(tf.sqrt(area / ratio))
    fits = tf.logical_and(heights < size, widths < size)
    boxes = place_boxes(size, size, heights, widths, tops, lefts)
    nothing = tf.zeros_like(boxes[:, 0])
    boxes = first_that_fits(boxes, fits, nothing)
    return tf.where(chances < options.random_erasing, boxes, nothing)


def augment(image: tf.Tensor, changes: Changes, options: AugmentationOptions) -> tf.Tensor:
    """Augments an image: shift, flip, operations, colour changes, cutout, erasing.

    RandAugment and TrivialAugment follow the flip, as in torchvision: shears do not commute with
    flips. The other changes do; fb.resnet.torch flips last, with the same result.

    Args:
      image: uint8 [height, width, 3].
      changes: the image's part of the result of :func:`draw_changes`.
      options: those with which it was drawn.

    Returns:
      uint8, clipped to 0..255, of the image's shape.
    """
    shape = image.shape
    if "shift" in changes:
        image = shift(image, options.crop_padding, changes["shift"], options.crop_border)
    if "flip" in changes:
        image = flip(image, changes["flip"])
    if "operations" in changes:
        operations = (
            auto_augment.TRIVIAL_AUGMENT if options.trivial_augment else auto_augment.RAND_AUGMENT
        )
        image = apply(image, changes["operations"], changes["strengths"], operations)
    if changes.keys() & {"jitter", "light", "chroma", "lighting"}:
        pixels = tf.cast(image, tf.float32)
        if "jitter" in changes:
            pixels = color_jitter(pixels, changes["jitter"])
        if "light" in changes:
            pixels = change_light(pixels[tf.newaxis], changes["light"][tf.newaxis], options)[0]
        if "chroma" in changes:
            pixels = shift_chroma(pixels, changes["chroma"])
        if "lighting" in changes:
            pixels = lighting(pixels, changes["lighting"])
        image = tf.saturate_cast(tf.round(pixels), tf.uint8)
    if "cut" in changes:
        image = cut_out(image[tf.newaxis], changes["cut"][tf.newaxis], options)[0]
    if "erased" in changes:
        image = erase(image, changes["erased"], options)
    return tf.ensure_shape(image, shape)


def shift(image: tf.Tensor, margin: int, corner: tf.Tensor, border: str = "zeros") -> tf.Tensor:
    """Returns a crop, of the image's size, of the padded image.

    Args:
      image: the image.
      margin: width of the padding at each side, in pixels.
      corner: int32 [2]: top and left of the crop in the padded image, at most twice the margin.
      border: padding: ``zeros``, or ``reflect`` for the image reflected at its border.
    """
    mode = {"zeros": "CONSTANT", "reflect": "REFLECT"}[border]
    padded = tf.pad(image, [[margin, margin], [margin, margin], [0, 0]], mode)
    return tf.slice(padded, tf.concat([corner, [0]], 0), tf.shape(image))


def flip(image: tf.Tensor, flipped: tf.Tensor) -> tf.Tensor:
    """Flips an image, [height, width, 3], left to right if ``flipped``, a bool scalar."""
    return tf.cond(flipped, lambda: tf.reverse(image, [1]), lambda: image)


def cut_out(images: tf.Tensor, corners: tf.Tensor, options: AugmentationOptions) -> tf.Tensor:
    """Fills a square of each image with the mean colour: cutout (DeVries and Taylor 2017).

    Args:
      images: uint8 [images, size, size, 3].
      corners: int32 [images, 2]: top and left of the squares.
      options: gives the squares' side, ``cutout``, and ``pixel_mean``.
    """
    places = tf.range(options.image_size) - corners[:, :, tf.newaxis]
    inside = (places >= 0) & (places < options.cutout)
    inside = inside[:, 0, :, tf.newaxis] & inside[:, 1, tf.newaxis, :]
    return tf.where(inside[..., tf.newaxis], _mean_color(options), images)


def erase(image: tf.Tensor, box: tf.Tensor, options: AugmentationOptions) -> tf.Tensor:
    """Fills a box of an image with the mean colour, as torchvision's ``RandomErasing``.

    The box is int32 [4]: top, left, height and width.
    """
    top, left, height, width = tf.unstack(box)
    rows, columns = tf.range(tf.shape(image)[0]) - top, tf.range(tf.shape(image)[1]) - left
    inside = ((rows >= 0) & (rows < height))[:, tf.newaxis] & (columns >= 0) & (columns < width)
    return tf.where(inside[..., tf.newaxis], _mean_color(options), image)


def _mean_color(options: AugmentationOptions) -> tf.Tensor:
    """Returns ``pixel_mean``, which normalization maps to 0, rounded to uint8."""
    return tf.constant([round(value) for value in options.pixel_mean], tf.uint8)


def color_jitter(image: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Changes brightness, contrast and saturation.

    Each is a blend of the image with, respectively, black, its mean grey and its greys. The order,
    random in fb.resnet.torch, does not matter, because pixels are not clipped in between.

    ``factors``, float32 [3], are the weights of the image in the blends.
    """
    brightness, contrast, saturation = tf.unstack(factors)
    grey = tf.tensordot(image, _LUMA, 1)[..., tf.newaxis]
    image = saturation * image + (1 - saturation) * grey
    image = contrast * image + (1 - contrast) * tf.reduce_mean(grey)
    return brightness * image


def change_light(images: tf.Tensor, changes: tf.Tensor, options: AugmentationOptions) -> tf.Tensor:
    """Changes the brightness and contrast of normalized pixels, as Hiverge's speedrun (2025).

    Normalized pixels x become ``factor * (x + shift)``.

    Args:
      images: float32 [images, height, width, 3].
      changes: float32 [images, 2], the shift and the factor.
      options: gives ``pixel_mean`` and ``pixel_std``.
    """
    mean, std = tf.constant(options.pixel_mean), tf.constant(options.pixel_std)
    shifts, factors = tf.split(changes[:, tf.newaxis, tf.newaxis], 2, axis=-1)
    return mean + factors * (images - mean + shifts * std)


def shift_chroma(image: tf.Tensor, shifts: tf.Tensor) -> tf.Tensor:
    """Adds to Cb and Cr, as tensorflow/tpu's AmoebaNet does beside changing the brightness.

    ``shifts``, float32 [2], are those of Cb and Cr, in units of the full range.
    """
    return image + 255 * tf.linalg.matvec(_RGB_OF_CHROMA, shifts)


def lighting(image: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
    """Adds a colour, a combination of the principal components of ImageNet's colours.

    ``amounts``, float32 [3], are those of the components, in units of their eigenvalues.
    """
    return image + 255 * tf.linalg.matvec(_EIGENVECTORS, amounts * _EIGENVALUES)
