"""RandAugment (Cubuk et al. 2019, "RandAugment: Practical automated data augmentation").

Each layer does one of 14 operations, drawn with even odds, all at the same magnitude. The images
are uint8 [height, width, 3], and the operations give Pillow's pixels, with which the paper's were
made: the geometric ones take the nearest pixel, and grey where there is none.

At the greatest magnitude they are AutoAugment's (Cubuk et al. 2018), whose translation of 150 of
331 pixels is a share of any image's size here. At magnitude 0 none does anything, apart from
autocontrast and equalize, which have no magnitude. In the authors' code solarize and posterize
grow weaker with the magnitude, and colour, contrast, brightness and sharpness go from 0.1 to 1.9;
here, as in torchvision, all grow stronger, those four either way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from imagenet_fast.data import draws

MOST = 10.0

_FILL = 128.0
_DEGREES = 30.0
_SHEAR = 0.3
_TRANSLATION = 150 / 331
_ENHANCEMENT = 0.9
_POSTERIZED_BITS = 4.0


def draw(identities: tf.Tensor, layers: int, magnitude: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws what :func:`rand_augment` will do.

    Args:
      identities: int64 [images, 3], as :func:`draws.uniform` takes them.
      layers: operations for each image.
      magnitude: 0..10.

    Returns:
      ``(operations, strengths)``: int32 [images, layers], indices of :data:`OPERATIONS`, and
      float32 [images, layers], the magnitude as a share of the greatest, with a sign.
    """
    kinds, signs = tf.split(draws.uniform(identities, "rand augment", 2 * layers), 2, axis=1)
    operations = tf.cast(kinds * len(OPERATIONS), tf.int32)
    strength = magnitude / MOST
    return operations, tf.where(signs < 0.5, -strength, strength)


def rand_augment(image: tf.Tensor, operations: tf.Tensor, strengths: tf.Tensor) -> tf.Tensor:
    """Changes an image by one operation after another.

    Args:
      image: uint8 [height, width, 3].
      operations: int32 [layers], indices of :data:`OPERATIONS`.
      strengths: float32 [layers], in [-1, 1].

    Returns:
      uint8, of the image's shape.
    """
    for operation, strength in zip(tf.unstack(operations), tf.unstack(strengths)):
        changes = [functools.partial(change, image, strength) for change in OPERATIONS.values()]
        image = tf.ensure_shape(tf.switch_case(operation, changes), image.shape)
    return image


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretches each colour from 0 to 255."""
    least = tf.cast(tf.reduce_min(image, [0, 1]), tf.float64)
    most = tf.cast(tf.reduce_max(image, [0, 1]), tf.float64)
    scale = tf.where(most > least, 255 / tf.maximum(most - least, 1), 1)
    offset = tf.where(most > least, -least * scale, 0)
    width = tf.shape(image)[1]
    stretched = tf.cast(_rows(image), tf.float64) * tf.tile(scale, [width])
    stretched = tf.clip_by_value(stretched + tf.tile(offset, [width]), 0, 255)
    return tf.reshape(tf.cast(stretched, tf.uint8), tf.shape(image))


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Spreads each colour so that each level is about as frequent."""
    # Of 3 * 256 levels.
    levels = tf.cast(_rows(image), tf.int32) * 3 + tf.tile(tf.range(3), [tf.shape(image)[1]])
    counts = tf.math.bincount(tf.reshape(levels, [-1]), minlength=768, maxlength=768)
    counts = tf.reshape(counts, [256, 3])
    lower = tf.cumsum(counts, exclusive=True)
    # Pixels below the brightest level, for each of the 255 steps up to it.
    step = tf.reduce_max(tf.where(counts > 0, lower, 0), axis=0) // 255
    equalized = tf.minimum((lower + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, equalized, tf.range(256)[:, tf.newaxis])
    table = tf.reshape(tf.cast(table, tf.uint8), [-1])
    return tf.reshape(tf.gather(table, levels), tf.shape(image))


def solarize(image: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Inverts what is not below a threshold in 0..256."""
    bright = tf.cast(tf.cast(image, tf.float32) >= threshold, tf.uint8)
    return tf.bitwise.bitwise_xor(image, 255 * bright)


def posterize(image: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Keeps so many high bits, 1..8, of each colour."""
    lost = tf.cast(8 - bits, tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, lost), lost)


def color(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the image's own greys: 0 is grey, 1 the image, 2 has twice the colour."""
    return _blend(_greys(image), image, factor)


def contrast(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the grey of the image's mean: 0 is that grey, 1 the image."""
    # In whole numbers: float32 would not hold the sum.
    total, count = tf.reduce_sum(tf.cast(_greys(image), tf.int64)), tf.size(image, tf.int64)
    return _blend((2 * total + count) // (2 * count), image, factor)


def brightness(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with black: 0 is black, 1 the image."""
    return _blend(tf.constant(0.0), image, factor)


def sharpness(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with a smoothed image: 0 is smooth, 1 the image. The outermost pixels stay."""
    pixels = tf.cast(image, tf.float32)
    rows = pixels[:-2] + pixels[1:-1] + pixels[2:]
    squares = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    smooth = tf.round((squares + 4 * pixels[1:-1, 1:-1]) / 13)
    inside = _blend(smooth, image[1:-1, 1:-1], factor)
    middle = tf.concat([image[1:-1, :1], inside, image[1:-1, -1:]], axis=1)
    return tf.concat([image[:1], middle, image[-1:]], axis=0)


def rotate(image: tf.Tensor, degrees: tf.Tensor) -> tf.Tensor:
    """Turns the image around its centre, counterclockwise."""
    cosine, sine = tf.cos(degrees * math.pi / 180), tf.sin(degrees * math.pi / 180)
    y, x = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32) / 2)
    rows = [cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]
    return _transform(image, *rows)


def shear_x(image: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
    """Moves each row to the left by ``slope`` times its distance from the top."""
    return _transform(image, [1.0, slope, 0.0], [0.0, 1.0, 0.0])


def shear_y(image: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
    """Moves each column up by ``slope`` times its distance from the left side."""
    return _transform(image, [1.0, 0.0, 0.0], [slope, 1.0, 0.0])


def translate_x(image: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Moves the image to the left by a share of its width."""
    pixels = share * tf.cast(tf.shape(image)[1], tf.float32)
    return _transform(image, [1.0, 0.0, pixels], [0.0, 1.0, 0.0])


def translate_y(image: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Moves the image up by a share of its height."""
    pixels = share * tf.cast(tf.shape(image)[0], tf.float32)
    return _transform(image, [1.0, 0.0, 0.0], [0.0, 1.0, pixels])


# What becomes of (image, strength); a strength is in [-1, 1], and 1 is magnitude 10.
OPERATIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "identity": lambda image, strength: image,
    "autocontrast": lambda image, strength: autocontrast(image),
    "equalize": lambda image, strength: equalize(image),
    "rotate": lambda image, strength: rotate(image, _DEGREES * strength),
    "solarize": lambda image, strength: solarize(image, 256 * (1 - tf.abs(strength))),
    "color": lambda image, strength: color(image, 1 + _ENHANCEMENT * strength),
    "posterize": lambda image, strength: posterize(
        image, 8 - tf.round(_POSTERIZED_BITS * tf.abs(strength))
    ),
    "contrast": lambda image, strength: contrast(image, 1 + _ENHANCEMENT * strength),
    "brightness": lambda image, strength: brightness(image, 1 + _ENHANCEMENT * strength),
    "sharpness": lambda image, strength: sharpness(image, 1 + _ENHANCEMENT * strength),
    "shear_x": lambda image, strength: shear_x(image, _SHEAR * strength),
    "shear_y": lambda image, strength: shear_y(image, _SHEAR * strength),
    "translate_x": lambda image, strength: translate_x(image, _TRANSLATION * strength),
    "translate_y": lambda image, strength: translate_y(image, _TRANSLATION * strength),
}


def _rows(image: tf.Tensor) -> tf.Tensor:
    """Returns [height, width * 3], along which what differs by colour is faster to broadcast."""
    return tf.reshape(image, [tf.shape(image)[0], -1])


def _greys(image: tf.Tensor) -> tf.Tensor:
    """Returns each pixel's grey, as Pillow rounds it, three times: float32 [height, width, 3]."""
    weights = tf.tile(tf.constant([[19595.0], [38470.0], [7471.0]]), [1, 3])
    weighted = tf.reshape(tf.cast(image, tf.float32), [-1, 3]) @ weights  # below 2**24, thus exact
    return tf.reshape(tf.floor((weighted + 2**15) / 2**16), tf.shape(image))


def _blend(plain: tf.Tensor, image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns the plain image where the factor is 0, the image where it is 1; truncated."""
    plain = tf.cast(plain, tf.float32)
    blended = plain + factor * (tf.cast(image, tf.float32) - plain)
    return tf.cast(tf.clip_by_value(blended, 0, 255), tf.uint8)


def _transform(image: tf.Tensor, x: Sequence[Any], y: Sequence[Any]) -> tf.Tensor:
    """Takes the pixel (x, y) from where a linear map of (x, y, 1) says.

    Args:
      image: uint8 [height, width, 3].
      x: three coefficients of the source's x, for pixels whose centres are at halves.
      y: of its y.
    """
    # The operation has the centres at whole numbers.
    x_offset = x[2] + (x[0] + x[1] - 1) / 2
    y_offset = y[2] + (y[0] + y[1] - 1) / 2
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[tf.newaxis],
        transforms=tf.stack([*x[:2], x_offset, *y[:2], y_offset, 0.0, 0.0])[tf.newaxis],
        output_shape=tf.shape(image)[:2],
        fill_value=_FILL,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )[0]
