"""How far accuracies and probabilities can be relied on: intervals, calibration, temperature.

The interval is E. B. Wilson's of 1927 (J. Am. Stat. Assoc. 22). Calibration error, reliability
diagram and temperature scaling are those of Guo et al. 2017 ("On Calibration of Modern Neural
Networks").
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError

BINS = 15
# Of the normal distribution: 95% is within as many standard deviations.
_DEVIATIONS = 1.959963984540054
# From a sixteenth to 16, sixteen in an octave. Between two, a cubic finds the minimum to 1e-7.
_TEMPERATURES = 2.0 ** (np.arange(-64, 65) / 16)


def interval(fraction: float, count: float) -> tuple[float, float]:
    """Returns the 95% Wilson interval of an accuracy.

    Were other images drawn as these were, the interval would contain the model's accuracy on all
    such images 19 times in 20. It holds for few images, and for accuracies near 0 and 1.

    Args:
      fraction: the accuracy.
      count: number of images; 0: the interval is (0, 1).
    """
    if not count:
        return 0.0, 1.0
    per_image = _DEVIATIONS**2 / count
    spread = _DEVIATIONS * math.sqrt((fraction * (1 - fraction) + per_image / 4) / count)
    middle = fraction + per_image / 2
    low, high = ((middle + sign * spread) / (1 + per_image) for sign in (-1, 1))
    # Exact at the ends, where rounding could leave [0, 1].
    return (max(low, 0.0) if fraction > 0 else 0.0), (min(high, 1.0) if fraction < 1 else 1.0)


def accuracy_interval(accuracy: Any, images: Any) -> list[float] | None:
    """Returns :func:`interval` of what a row of metrics has, as JSON does; None: no accuracy."""
    numbers = isinstance(accuracy, (int, float)) and isinstance(images, (int, float))
    if not numbers or not 0 <= accuracy <= 1 or not 0 < images < math.inf:
        return None
    return [*interval(accuracy, images)]


def reliability(confidences: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the bins of a reliability diagram, float64 [15, 3].

    A bin has the number of its images, the sum of their confidences, and the number of right
    predictions. Bin ``i`` has confidences above ``i / 15``, up to ``(i + 1) / 15``.

    Args:
      confidences: the probability of each image's predicted class, [images].
      right: whether it is the image's, bool [images].
    """
    confidences = np.asarray(confidences, np.float64)
    bins = np.clip(np.ceil(confidences * BINS).astype(np.int64) - 1, 0, BINS - 1)
    columns = (np.ones_like(confidences), confidences, np.asarray(right, np.float64))
    return np.stack([np.bincount(bins, column, BINS) for column in columns], axis=1)


def calibration_error(bins: np.ndarray) -> float:
    """Returns the expected calibration error of the bins of :func:`reliability`.

    It is the mean, over images, of the gap between confidence and accuracy in the image's bin.
    """
    images, confidences, right = bins.T
    return float(np.abs(confidences - right).sum() / max(images.sum(), 1))


def temperature_sums(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns what :func:`fitted_temperature` needs of a batch, float32 [temperatures, 2].

    For each of a fixed range of temperatures, the first two derivatives of the sum of the images'
    cross-entropies, by the inverse temperature. They take no memory that grows with the images, and
    sums over replicas and workers are those of one device.

    Args:
      logits: float32 [batch, classes].
      labels: int32 [batch].
      weights: float32 [batch]; 0 for images that do not count.
    """
    counted = tf.cast(weights > 0, tf.float32)
    # Softmax ignores a constant; large ones would cost digits.
    logits -= tf.reduce_max(logits, axis=1, keepdims=True)
    of_label = tf.gather(logits, tf.maximum(labels, 0), batch_dims=1)

    def derivatives(temperature: tf.Tensor) -> tf.Tensor:
        probabilities = tf.nn.softmax(logits / temperature)
        mean = tf.reduce_sum(probabilities * logits, axis=1)
        variance = tf.reduce_sum(probabilities * (logits - mean[:, tf.newaxis]) ** 2, axis=1)
        return tf.stack([tf.reduce_sum(counted * d) for d in (mean - of_label, variance)])

    return tf.map_fn(derivatives, tf.constant(_TEMPERATURES, tf.float32))


def no_temperature_sums(batches: int) -> tf.Tensor:
    """Returns the zeros in which the :func:`temperature_sums` of so many batches are kept."""
    return tf.zeros([batches, len(_TEMPERATURES), 2])


def fitted_temperature(sums: np.ndarray) -> float:
    """Returns the temperature with the smallest cross-entropy of softmax(logits / temperature).

    The cross-entropy is convex in the inverse temperature, so it has one minimum: where its
    derivative, a cubic between the temperatures of the sums, is 0.

    Args:
      sums: those of :func:`temperature_sums` over all images, float64 [temperatures, 2].

    Raises:
      UserError: if the minimum is not between 1/16 and 16, as if all predictions are right.
    """
    inverse, slopes, curvatures = 1 / _TEMPERATURES[::-1], *sums[::-1].T
    after = int(np.searchsorted(slopes, 0))
    if not np.isfinite(sums).all() or after in (0, len(slopes)):
        reason = "all predictions are right, or nearly so" if after else "it is no better at any"
        raise UserError(
            "no temperature from 1/16 to 16 has the smallest cross-entropy on these images: "
            f"{reason}; fit it on more images, or leave it at 1"
        )
    step = inverse[after] - inverse[after - 1]
    (f0, f1), (d0, d1) = slopes[after - 1 : after + 1], step * curvatures[after - 1 : after + 1]
    # Hermite's cubic in 0..1, of the values and derivatives at both ends.
    cubic = np.array([2 * (f0 - f1) + d0 + d1, 3 * (f1 - f0) - 2 * d0 - d1, d0, f0])
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.polyval(cubic, middle) < 0 else (low, middle)
    return float(1 / (inverse[after - 1] + step * low))
