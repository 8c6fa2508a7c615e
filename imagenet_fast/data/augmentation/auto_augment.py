"""Random choices of RandAugment and TrivialAugment.

RandAugment (Cubuk et al. 2019, "RandAugment: Practical automated data augmentation"): each layer
applies one of 14 operations, chosen uniformly, all at the same magnitude. The maximum magnitude is
AutoAugment's (Cubuk et al. 2018), except that its translation by 150 pixels of 331 is relative to
the image's size. At magnitude 0, only autocontrast and equalize, which have no magnitude, change an
image. In the authors' code, solarize and posterize become weaker with the magnitude, and the
factors of colour, contrast, brightness and sharpness range from 0.1 to 1.9; here, as in
torchvision, all become stronger, the latter four in either direction. Pixels from outside of the
image are grey.

TrivialAugment (Müller and Hutter 2021, "TrivialAugment: Tuning-free Yet State-of-the-Art Data
Augmentation"): one of the same operations at one of 31 strengths, both chosen uniformly, with wider
ranges. As in torchvision's ``TrivialAugmentWide``, pixels from outside of the image are black.

Operations are drawn for identities, int64 [images, 3], see :func:`stateless_random.uniform`.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data.augmentation import stateless_random
from imagenet_fast.data.augmentation.image_operations import operations

_MAX_MAGNITUDE = 10.0
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
    """Draws RandAugment's operations: ``layers`` per image, of a magnitude in 0..10.

    Returns:
      ``(numbers, strengths)``: int32 [images, layers], indices in :data:`RAND_AUGMENT`, and float32
      [images, layers], the magnitude as a fraction of the maximum, with a random sign.
    """
    kinds, signs = tf.split(
        stateless_random.uniform(identities, "rand augment", 2 * layers), 2, axis=1
    )
    strength = magnitude / _MAX_MAGNITUDE
    return _indices(kinds), tf.where(signs < 0.5, -strength, strength)


def draw_trivial_augment(identities: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws TrivialAugment's operations.

    Returns:
      ``(numbers, strengths)``: int32 [images, 1], indices in :data:`TRIVIAL_AUGMENT`, and float32
      [images, 1], in [-1, 1].
    """
    kinds, strengths, signs = tf.split(
        stateless_random.uniform(identities, "trivial augment", 3), 3, axis=1
    )
    strengths = tf.floor(strengths * _STRENGTHS) / (_STRENGTHS - 1)
    return _indices(kinds), tf.where(signs < 0.5, -strengths, strengths)


def _indices(kinds: tf.Tensor) -> tf.Tensor:
    return tf.cast(kinds * len(RAND_AUGMENT), tf.int32)
