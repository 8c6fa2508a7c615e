"""Loss and accuracy, summed on the device over steps; reading them needs no communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.distribute.one_call import (
    assign_everywhere,
    assign_local,
    local_variable,
    one_call,
)

NAMES = ("loss", "top1", "top5", "examples", "skipped")


def batch_sums(
    logits: tf.Tensor, losses: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
) -> tf.Tensor:
    """Returns the sums over a batch that :class:`MetricSums` accumulates.

    Args:
      logits: float32 [batch, classes].
      losses: float32 [batch], not weighted.
      labels: int32 [batch]; negative ones mark padding. Of multi-label data int32 [batch, classes],
        0 or 1: a prediction is correct if it is one of the image's labels.
      weights: float32 [batch]; 0 for images that do not count, usually 1 for the others.

    Returns:
      float32 [5]: the weighted sums of losses, of correct top-1 and of correct top-5 predictions,
      the sum of weights, and the number of images of weight 0, without padding.
    """
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank == 1:
        label_logits = tf.gather(logits, tf.maximum(labels, 0), batch_dims=1)
    else:
        # That of the best label; NaN without any.
        label_logits = tf.reduce_max(tf.where(labels > 0, logits, -np.inf), axis=1)
        label_logits = tf.where(tf.reduce_any(labels > 0, axis=1), label_logits, np.nan)
    # Ties count against the model: equal logits predict nothing. NaN compares as false.
    rank = tf.reduce_sum(tf.cast(logits >= label_logits[:, tf.newaxis], tf.int32), axis=1)
    finite = tf.cast(rank > 0, tf.float32)
    return tf.stack(
        [
            tf.reduce_sum(losses * weights),
            tf.reduce_sum(tf.cast(rank <= 1, tf.float32) * finite * weights),
            tf.reduce_sum(tf.cast(rank <= 5, tf.float32) * finite * weights),
            tf.reduce_sum(weights),
            _skipped(labels, weights),
        ]
    )


def skipped_sums(labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns the part of :func:`batch_sums` that counts images of weight 0, float32 [5]."""
    return tf.stack([tf.zeros([])] * (len(NAMES) - 1) + [_skipped(labels, weights)])


def _skipped(labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    of_image = labels if labels.shape.rank == 1 else labels[:, 0]
    real = tf.cast(of_image >= 0, tf.float32)
    return tf.reduce_sum(real * tf.cast(weights == 0, tf.float32))


class MetricSums:
    """Running totals of :func:`batch_sums`, already summed over the replicas.

    Each replica has a copy of the same numbers, so neither adding nor reading communicates. Float32
    counts images exactly up to 16.7 million. Made in the strategy's scope. Not a ``tf.Module``,
    whose variable Keras would count among the model's weights.
    """

    def __init__(self) -> None:
        self.variable = local_variable(tf.zeros([len(NAMES)]), "sums")
        self._reset = one_call(
            tf.distribute.get_strategy(),
            lambda: assign_local([self.variable], [tf.zeros([len(NAMES)])]),
        )

    def restore(self, sums: Mapping[str, float]) -> None:
        """Sets the sums to what :meth:`sums` returned; outside of replicas."""
        assign_everywhere([self.variable], [tf.constant([sums[name] for name in NAMES])])

    def reset(self) -> None:
        """Sets the sums to 0; outside of replicas."""
        self._reset()

    def add(self, sums: tf.Tensor) -> None:
        """Adds one step's sums over all replicas, float32 [5]."""
        self.variable.assign_add(sums)

    def sums(self) -> dict[str, float]:
        """Returns the sums, by name; outside of replicas. Waits for the devices."""
        return dict(zip(NAMES, self.variable.numpy().tolist()))

    def results(self) -> dict[str, tf.Tensor]:
        """Returns the means over the images so far, and their number: float32 scalars."""
        sums = dict(zip(NAMES, tf.unstack(self.variable.read_value())))
        examples = sums["examples"]
        means = {name: tf.math.divide_no_nan(sums[name], examples) for name in NAMES[:3]}
        return {**means, "examples": examples, "skipped": sums["skipped"]}


class Metric(NamedTuple):
    """One of the metrics, for Keras."""

    name: str
    metric_sums: MetricSums

    def reset_state(self) -> None:
        """Resets all metrics; Keras calls it before each epoch and each evaluation."""
        self.metric_sums.reset()

    def result(self) -> tf.Tensor:
        """Returns the metric over the images so far, float32."""
        return self.metric_sums.results()[self.name]
