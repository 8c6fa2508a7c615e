"""Mixup and cutmix, on the device that trains.

Mixup (Zhang et al. 2018, "mixup: Beyond empirical risk minimization") blends an image with a
partner; cutmix (Yun et al. 2019, "CutMix: Regularization strategy to train strong classifiers with
localizable features") pastes a box of the partner into it. Each label's weight in the loss is its
image's fraction of the pixels.

Random numbers are drawn per image; the authors and timm draw them once per batch. Partners come
from the reversed batch: any image will do, since batches are shuffled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.data.augmentation import stateless_random

_INTERVALS = 1024


class Mixed(NamedTuple):
    """Mixed images and the labels of both parts.

    Attributes:
      images: of the unmixed images' dtype and shape.
      partners: int32 [batch], the partners' labels.
      fractions: float32 [batch], in [0, 1], weight of the image's own label in the loss; the
        partner's label has the rest.
    """

    images: tf.Tensor
    partners: tf.Tensor
    fractions: tf.Tensor


class Mixer:
    """Applies mixup, cutmix, or to each image one of the two with equal probability.

    Args:
      mixup_alpha: an image's fraction is drawn from Beta(alpha, alpha); 0: no mixup.
      cutmix_alpha: the same for cutmix. One of the two is positive.
      seed: of the random numbers.
    """

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, seed: int) -> None:
        self._seed = seed
        self._mixup_probability = 1.0 if not cutmix_alpha else 0.5 if mixup_alpha else 0.0
        # If one of them is never used, its quantiles do not matter.
        self._mixup_quantiles = beta_quantiles(mixup_alpha or cutmix_alpha)
        self._cutmix_quantiles = beta_quantiles(cutmix_alpha or mixup_alpha)

    def draw(self, count: Any, step: Any, replica: Any) -> tf.Tensor:
        """Returns random numbers for :meth:`mix`, from the seed, the step and the image's position.

        Args:
          count: images of this and of each other replica, int32.
          step: the optimizer's.
          replica: number of this replica, int32.

        Returns:
          float32 [count, 4], uniform in [0, 1).
        """
        places = tf.range(count, dtype=tf.int64) + tf.cast(replica * count, tf.int64)
        run = tf.fill([count], tf.constant(self._seed, tf.int64))
        steps = tf.fill([count], tf.cast(step, tf.int64))
        # TensorFlow's own random numbers differ under XLA, which always compiles for TPUs.
        return stateless_random.uniform(tf.stack([run, steps, places], axis=1), "mix", 4)

    def mix(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, numbers: tf.Tensor
    ) -> Mixed:
        """Mixes each image with its partner, unless the partner's weight is 0.

        Args:
          images: [batch, height, width, channels]. Integers are rounded after mixing, so that the
            network's input has the same dtype as without mixing.
          labels: int32 [batch].
          weights: float32 [batch]; 0 for images that do not count.
          numbers: float32 [batch, 4], from :meth:`draw`.
        """
        kind, quantile, y, x = tf.unstack(numbers, axis=1)
        by_mixup = kind < self._mixup_probability
        fractions = tf.where(
            by_mixup,
            _interpolate(self._mixup_quantiles, quantile),
            _interpolate(self._cutmix_quantiles, quantile),
        )
        fractions = tf.where(tf.reverse(weights, [0]) > 0, fractions, 1.0)
        height, width = tf.unstack(tf.shape(images)[1:3])
        outside = tf.cast(~boxes(1 - fractions, y, x, height, width), tf.float32)
        mask = tf.where(_per_pixel(by_mixup), _per_pixel(fractions), outside[..., tf.newaxis])
        # The true area of a box: rounded to pixels and clipped at the image's borders.
        fractions = tf.where(by_mixup, fractions, tf.reduce_mean(outside, axis=[1, 2]))

        pixels = tf.cast(images, tf.float32)
        mixed = mask * pixels + (1 - mask) * tf.reverse(pixels, [0])
        if images.dtype.is_integer:
            mixed = tf.round(mixed)
        return Mixed(tf.cast(mixed, images.dtype), tf.reverse(labels, [0]), fractions)


def boxes(
    areas: tf.Tensor, y: tf.Tensor, x: tf.Tensor, height: tf.Tensor, width: tf.Tensor
) -> tf.Tensor:
    """Returns masks of boxes with the image's aspect ratio.

    Args:
      areas: float32 [boxes], fractions of the image's area, before clipping at its borders.
      y: float32 [boxes], their centres, as fractions of the height.
      x: float32 [boxes], as fractions of the width.
      height: int32, of the image, in pixels.
      width: int32.

    Returns:
      bool [boxes, height, width]: true inside.
    """

    def along(size: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
        size = tf.cast(size, tf.float32)
        length = tf.round(tf.sqrt(areas) * size)
        first = tf.round(centre * size - length / 2)
        places = tf.range(size) - first[:, tf.newaxis]
        return (places >= 0) & (places < length[:, tf.newaxis])

    return along(height, y)[:, :, tf.newaxis] & along(width, x)[:, tf.newaxis, :]


def beta_quantiles(alpha: float) -> np.ndarray:
    """Returns the quantiles 0, 1/1024, ... 1 of Beta(alpha, alpha), float32 [1025].

    XLA, and so a TPU, has no op that draws from gamma or beta distributions; it can interpolate
    these.
    """
    quantiles = np.linspace(0, 1, _INTERVALS + 1)
    low, high = np.zeros_like(quantiles), np.ones_like(quantiles)
    for _ in range(np.finfo(np.float64).nmant):
        middle = (low + high) / 2
        above = tf.math.betainc(np.full_like(middle, alpha), alpha, middle).numpy() > quantiles
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return low.astype(np.float32)


def _interpolate(quantiles: np.ndarray, at: tf.Tensor) -> tf.Tensor:
    """Interpolates a table linearly at positions in [0, 1)."""
    positions = at * _INTERVALS
    before = tf.cast(positions, tf.int32)
    rest = positions - tf.cast(before, tf.float32)
    table = tf.constant(quantiles)
    return (1 - rest) * tf.gather(table, before) + rest * tf.gather(table, before + 1)


def _per_pixel(values: tf.Tensor) -> tf.Tensor:
    """Returns [batch] as [batch, 1, 1, 1]."""
    return values[:, tf.newaxis, tf.newaxis, tf.newaxis]
