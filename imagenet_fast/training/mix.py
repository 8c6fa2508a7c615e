"""Mixup and cutmix, on the device that trains.

Mixup (Zhang et al. 2018, "mixup: Beyond empirical risk minimization") blends an image with another
one; cutmix (Yun et al. 2019, "CutMix: Regularization strategy to train strong classifiers with
localizable features") puts a box of the other one into it. Each label's share of the loss is its
image's share of the pixels.

What becomes of an image is drawn for that image alone; the authors and timm draw once for a whole
batch. The other image is the one as far from the batch's end as this one is from its beginning:
any will do, since the batch is shuffled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.data import stateless_random

_INTERVALS = 1024


class Mixed(NamedTuple):
    """Images with parts of others.

    Attributes:
      images: of the dtype and shape of what was mixed.
      partners: int32 [batch], labels of the others.
      fractions: float32 [batch], in [0, 1], weight of the own label in the loss; the
        partner's is the rest.
    """

    images: tf.Tensor
    partners: tf.Tensor
    fractions: tf.Tensor


class Mixer:
    """Mixes the images of a batch: by mixup, by cutmix, or each by one of them with even odds.

    Args:
      mixup_alpha: an image's own share is drawn from Beta(alpha, alpha); 0: no mixup.
      cutmix_alpha: the same for cutmix. One of the two is positive.
      seed: of what is drawn.
    """

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, seed: int) -> None:
        self._seed = seed
        self._blending_odds = 1.0 if not cutmix_alpha else 0.5 if mixup_alpha else 0.0
        # Where one is never drawn, any shares will do for it.
        self._blending_quantiles = beta_quantiles(mixup_alpha or cutmix_alpha)
        self._cutting_quantiles = beta_quantiles(cutmix_alpha or mixup_alpha)

    def draw(self, count: Any, step: Any, replica: Any) -> tf.Tensor:
        """Returns what :meth:`mix` takes, a function of the seed, the step and the image's place.

        Args:
          count: images of this replica, int32, as many as of the others.
          step: of the optimizer.
          replica: its number among all, int32.

        Returns:
          float32 [count, 4], uniform in [0, 1).
        """
        places = tf.range(count, dtype=tf.int64) + tf.cast(replica * count, tf.int64)
        run = tf.fill([count], tf.constant(self._seed, tf.int64))
        steps = tf.fill([count], tf.cast(step, tf.int64))
        # TensorFlow's own random numbers are others where XLA compiles, as it always does for TPUs.
        return stateless_random.uniform(tf.stack([run, steps, places], axis=1), "mix", 4)

    def mix(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, numbers: tf.Tensor
    ) -> Mixed:
        """Mixes each image with another one, if that one counts.

        Args:
          images: [batch, height, width, channels]. Integers are rounded again after mixing, so that
            the network's input is what it is without.
          labels: int32 [batch].
          weights: float32 [batch]; 0 for images that do not count.
          numbers: float32 [batch, 4], drawn.
        """
        kind, quantile, y, x = tf.unstack(numbers, axis=1)
        blended = kind < self._blending_odds
        shares = tf.where(
            blended,
            _interpolate(self._blending_quantiles, quantile),
            _interpolate(self._cutting_quantiles, quantile),
        )
        shares = tf.where(tf.reverse(weights, [0]) > 0, shares, 1.0)
        height, width = tf.unstack(tf.shape(images)[1:3])
        outside = tf.cast(~boxes(1 - shares, y, x, height, width), tf.float32)
        pixel_shares = tf.where(_per_pixel(blended), _per_pixel(shares), outside[..., tf.newaxis])
        # Of a box as it is, rounded to pixels and clipped at the image's sides.
        shares = tf.where(blended, shares, tf.reduce_mean(outside, axis=[1, 2]))

        pixels = tf.cast(images, tf.float32)
        mixed = pixel_shares * pixels + (1 - pixel_shares) * tf.reverse(pixels, [0])
        if images.dtype.is_integer:
            mixed = tf.round(mixed)
        return Mixed(tf.cast(mixed, images.dtype), tf.reverse(labels, [0]), shares)


def boxes(
    areas: tf.Tensor, y: tf.Tensor, x: tf.Tensor, height: tf.Tensor, width: tf.Tensor
) -> tf.Tensor:
    """Returns where boxes of the image's aspect are.

    Args:
      areas: float32 [boxes], shares of the image's area, before what lies outside is cut off.
      y: float32 [boxes], of the centres, shares of the height.
      x: the same along the width.
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

    To draw by them is all that XLA, and so a TPU, can do: it has no operation that draws from gamma
    or beta distributions.
    """
    quantiles = np.linspace(0, 1, _INTERVALS + 1)
    low, high = np.zeros_like(quantiles), np.ones_like(quantiles)
    for _ in range(np.finfo(np.float64).nmant):
        middle = (low + high) / 2
        above = tf.math.betainc(np.full_like(middle, alpha), alpha, middle).numpy() > quantiles
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return low.astype(np.float32)


def _interpolate(quantiles: np.ndarray, at: tf.Tensor) -> tf.Tensor:
    """Returns what lies at places in [0, 1) between a table's first and last value."""
    places = at * _INTERVALS
    before = tf.cast(places, tf.int32)
    rest = places - tf.cast(before, tf.float32)
    table = tf.constant(quantiles)
    return (1 - rest) * tf.gather(table, before) + rest * tf.gather(table, before + 1)


def _per_pixel(values: tf.Tensor) -> tf.Tensor:
    """Returns [batch] as [batch, 1, 1, 1]."""
    return values[:, tf.newaxis, tf.newaxis, tf.newaxis]
