"""RandAugment and TrivialAugment: what is drawn for each training image.

RandAugment (Cubuk et al. 2019, "RandAugment: Practical automated data augmentation"): each layer
does one of 14 operations, drawn with even odds, all at the same magnitude. At the greatest
magnitude they are AutoAugment's (Cubuk et al. 2018), whose translation of 150 of 331 pixels is a
fraction of any image's size here. At magnitude 0 none does anything, apart from autocontrast and
equalize, which have no magnitude. In the authors' code solarize and posterize grow weaker with
the magnitude, and colour, contrast, brightness and sharpness go from 0.1 to 1.9; here, as in
torchvision, all grow stronger, those four either way. What is moved in is grey.

TrivialAugment (Müller and Hutter 2021, "TrivialAugment: Tuning-free Yet State-of-the-Art Data
Augmentation"): one of the same operations, at one of 31 strengths, with even odds, from wider
ranges. As in torchvision's ``TrivialAugmentWide``, what is moved in is black.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data import stateless_random
from imagenet_fast.data.image_operations import operations

MOST = 10.0
_STRENGTHS = 31

RAND_AUGMENT = operations(
    degrees=30.0,
    slope=0.3,
    pixels=lambda strength, side: 150 / 331 * strength * side,
    enhancement=0.9,
    bits=4.0,
    threshold=256.0,
    fill=128.0,
)
TRIVIAL_AUGMENT = operations(
    degrees=135.0,
    slope=0.99,
    pixels=lambda strength, side: tf.floor(32 * tf.abs(strength)) * tf.sign(strength),
    enhancement=0.99,
    bits=6.0,
    threshold=255.0,
    fill=0.0,
)


def draw_rand_augment(
    identities: tf.Tensor, layers: int, magnitude: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws RandAugment's operations.

    Args:
      identities: int64 [images, 3], as :func:`stateless_random.uniform` takes them.
      layers: operations for each image.
      magnitude: 0..10.

    Returns:
      ``(numbers, strengths)``: int32 [images, layers], places in :data:`RAND_AUGMENT`, and float32
      [images, layers], the magnitude as a fraction of the greatest, with a sign.
    """
    kinds, signs = tf.split(
        stateless_random.uniform(identities, "rand augment", 2 * layers), 2, axis=1
    )
    strength = magnitude / MOST
    return _places(kinds), tf.where(signs < 0.5, -strength, strength)


def draw_trivial_augment(identities: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws TrivialAugment's operations.

    Args:
      identities: int64 [images, 3], as :func:`stateless_random.uniform` takes them.

    Returns:
      ``(numbers, strengths)``: int32 [images, 1], places in :data:`TRIVIAL_AUGMENT`, and float32
      [images, 1], in [-1, 1].
    """
    kinds, strengths, signs = tf.split(
        stateless_random.uniform(identities, "trivial augment", 3), 3, axis=1
    )
    strengths = tf.floor(strengths * _STRENGTHS) / (_STRENGTHS - 1)
    return _places(kinds), tf.where(signs < 0.5, -strengths, strengths)


def _places(kinds: tf.Tensor) -> tf.Tensor:
    return tf.cast(kinds * len(RAND_AUGMENT), tf.int32)
