"""The loss of each image: softmax cross-entropy, with label smoothing and mixed labels."""

from __future__ import annotations

import tensorflow as tf


def image_losses(
    logits: tf.Tensor,
    labels: tf.Tensor,
    partners: tf.Tensor | None = None,
    fractions: tf.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> tf.Tensor:
    """Returns each image's loss, float32 [batch].

    Args:
      logits: [batch, classes].
      labels: int32 [batch]; negative ones mark padding, treated as class 0.
      partners: int32 [batch], labels of the images mixed in; None: images are not mixed.
      fractions: float32 [batch], weights of ``labels`` in the loss; ``partners`` have the rest.
      label_smoothing: probability spread evenly over all classes.
    """
    losses = _cross_entropy(logits, labels, label_smoothing)
    if partners is None or fractions is None:
        return losses
    return fractions * losses + (1 - fractions) * _cross_entropy(logits, partners, label_smoothing)


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    logits = tf.cast(logits, tf.float32)
    labels = tf.maximum(labels, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if not label_smoothing:
        return losses
    # The cross-entropy against (1 - s) * one-hot + s / classes.
    uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1 - label_smoothing) * losses + label_smoothing * uniform
