"""The 14 operations of RandAugment and TrivialAugment, with the same pixels as Pillow's.

Images are uint8 [height, width, 3]. Geometric operations use nearest-neighbour interpolation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

# A function of the image and the strength, a float32 scalar in [-1, 1].
Operation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def operations(
    *,
    degrees: float,
    slope: float,
    pixels: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    enhancement: float,
    bits: float,
    threshold: float,
    fill: float,
) -> dict[str, Operation]:
    """Returns all operations by name.

    Autocontrast and equalize ignore the strength, solarize and posterize its sign.

    Args:
      degrees: angle of rotation at strength 1.
      slope: of shears at strength 1.
      pixels: returns a translation in pixels, given the strength and the image's side in pixels.
      enhancement: difference from 1 of the factors of colour, contrast, brightness and sharpness at
        strength 1.
      bits: number of bits, of 8, that posterize removes at strength 1.
      threshold: of solarize at strength 0; at strength 1 it is 0.
      fill: value of pixels from outside of the image, in geometric operations.
    """

    def enhanced(change: Operation) -> Operation:
        return lambda image, strength: change(image, 1 + enhancement * strength)

    def shift(image: tf.Tensor, strength: tf.Tensor, axis: int) -> tf.Tensor:
        return pixels(strength, tf.cast(tf.shape(image)[axis], tf.float32))

    def posterized(image: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
        return posterize(image, 8 - tf.round(bits * tf.abs(strength)))

    return {
        "identity": lambda image, strength: image,
        "autocontrast": lambda image, strength: autocontrast(image),
        "equalize": lambda image, strength: equalize(image),
        "rotate": lambda image, strength: rotate(image, degrees * strength, fill),
        "solarize": lambda image, strength: solarize(image, threshold * (1 - tf.abs(strength))),
        "color": enhanced(color),
        "posterize": posterized,
        "contrast": enhanced(contrast),
        "brightness": enhanced(brightness),
        "sharpness": enhanced(sharpness),
        # To the left or up if positive; shears by the distance from the top or the left side.
        "shear_x": lambda image, strength: _transform(image, fill, x=[1.0, slope * strength, 0.0]),
        "shear_y": lambda image, strength: _transform(image, fill, y=[slope * strength, 1.0, 0.0]),
        "translate_x": lambda image, strength: _transform(
            image, fill, x=[1.0, 0.0, shift(image, strength, axis=1)]
        ),
        "translate_y": lambda image, strength: _transform(
            image, fill, y=[0.0, 1.0, shift(image, strength, axis=0)]
        ),
    }


def apply(
    image: tf.Tensor, numbers: tf.Tensor, strengths: tf.Tensor, operations: Mapping[str, Operation]
) -> tf.Tensor:
    """Applies operations to an image, one after another.

    Args:
      image: uint8 [height, width, 3].
      numbers: int32 [layers], indices in ``operations``.
      strengths: float32 [layers], in [-1, 1].
      operations: the operations to choose from, by name.
    """
    for number, strength in zip(tf.unstack(numbers), tf.unstack(strengths)):
        branches = [functools.partial(each, image, strength) for each in operations.values()]
        image = tf.ensure_shape(tf.switch_case(number, branches), image.shape)
    return image


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretches each channel to the range 0 to 255."""
    least = tf.cast(tf.reduce_min(image, [0, 1]), tf.float64)
    most = tf.cast(tf.reduce_max(image, [0, 1]), tf.float64)
    scale = tf.where(most > least, 255 / tf.maximum(most - least, 1), 1)
    offset = tf.where(most > least, -least * scale, 0)
    width = tf.shape(image)[1]
    stretched = tf.cast(_rows(image), tf.float64) * tf.tile(scale, [width])
    stretched = tf.clip_by_value(stretched + tf.tile(offset, [width]), 0, 255)
    return tf.reshape(tf.cast(stretched, tf.uint8), tf.shape(image))


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Equalizes the histogram of each channel."""
    # Indices in [level, channel], flattened: 256 * 3.
    levels = tf.cast(_rows(image), tf.int32) * 3 + tf.tile(tf.range(3), [tf.shape(image)[1]])
    counts = tf.math.bincount(tf.reshape(levels, [-1]), minlength=768, maxlength=768)
    counts = tf.reshape(counts, [256, 3])
    lower = tf.cumsum(counts, exclusive=True)
    # The number of pixels below the highest level, divided by 255.
    step = tf.reduce_max(tf.where(counts > 0, lower, 0), axis=0) // 255
    equalized = tf.minimum((lower + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, equalized, tf.range(256)[:, tf.newaxis])
    table = tf.reshape(tf.cast(table, tf.uint8), [-1])
    return tf.reshape(tf.gather(table, levels), tf.shape(image))


def solarize(image: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Inverts levels at or above a threshold in 0..256."""
    bright = tf.cast(tf.cast(image, tf.float32) >= threshold, tf.uint8)
    return tf.bitwise.bitwise_xor(image, 255 * bright)


def posterize(image: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Keeps the highest ``bits``, 1..8, of each level."""
    low = tf.cast(8 - bits, tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, low), low)


def color(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends the greyscale image, at factor 0, with the image, at 1; 2 doubles the saturation."""
    return _blend(_greys(image), image, factor)


def contrast(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends the image's mean grey, at factor 0, with the image, at 1."""
    # In integers, because float32 cannot represent the sum.
    total, count = tf.reduce_sum(tf.cast(_greys(image), tf.int64)), tf.size(image, tf.int64)
    return _blend((2 * total + count) // (2 * count), image, factor)


def brightness(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends black, at factor 0, with the image, at 1."""
    return _blend(tf.constant(0.0), image, factor)


def sharpness(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends a smoothed image, at factor 0, with the image, at 1; outermost pixels stay."""
    pixels = tf.cast(image, tf.float32)
    rows = pixels[:-2] + pixels[1:-1] + pixels[2:]
    squares = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    smooth = tf.round((squares + 4 * pixels[1:-1, 1:-1]) / 13)
    inside = _blend(smooth, image[1:-1, 1:-1], factor)
    middle = tf.concat([image[1:-1, :1], inside, image[1:-1, -1:]], axis=1)
    return tf.concat([image[:1], middle, image[-1:]], axis=0)


def rotate(image: tf.Tensor, degrees: tf.Tensor, fill: float) -> tf.Tensor:
    """Rotates the image around its centre, counterclockwise."""
    cosine, sine = tf.cos(degrees * math.pi / 180), tf.sin(degrees * math.pi / 180)
    y, x = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32) / 2)
    rows = [cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]
    return _transform(image, fill, *rows)


def _rows(image: tf.Tensor) -> tf.Tensor:
    """Reshapes to [height, width * 3], on which operations per channel are faster."""
    return tf.reshape(image, [tf.shape(image)[0], -1])


def _greys(image: tf.Tensor) -> tf.Tensor:
    """Returns the greyscale image, rounded as Pillow does, as float32 [height, width, 3]."""
    weights = tf.tile(tf.constant([[19595.0], [38470.0], [7471.0]]), [1, 3])
    weighted = tf.reshape(tf.cast(image, tf.float32), [-1, 3]) @ weights  # below 2**24, thus exact
    return tf.reshape(tf.floor((weighted + 2**15) / 2**16), tf.shape(image))


def _blend(plain: tf.Tensor, image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns ``plain`` at factor 0 and ``image`` at factor 1, truncated to uint8."""
    plain = tf.cast(plain, tf.float32)
    blended = plain + factor * (tf.cast(image, tf.float32) - plain)
    return tf.cast(tf.clip_by_value(blended, 0, 255), tf.uint8)


def _transform(
    image: tf.Tensor,
    fill: float,
    x: Sequence[Any] = (1.0, 0.0, 0.0),
    y: Sequence[Any] = (0.0, 1.0, 0.0),
) -> tf.Tensor:
    """Applies an affine transformation to an image.

    Args:
      image: uint8 [height, width, 3].
      fill: value of pixels from outside of the image.
      x: coefficients of the source's x as a linear function of the output's (x, y, 1), where
        pixels' centres are at half-integers.
      y: likewise of the source's y.
    """
    # In TensorFlow's op, centres are at integers.
    x_offset = x[2] + (x[0] + x[1] - 1) / 2
    y_offset = y[2] + (y[0] + y[1] - 1) / 2
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[tf.newaxis],
        transforms=tf.stack([*x[:2], x_offset, *y[:2], y_offset, 0.0, 0.0])[tf.newaxis],
        output_shape=tf.shape(image)[:2],
        fill_value=fill,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )[0]
