"""The loss of each image, with label smoothing and mixed labels, and its class probabilities."""

from __future__ import annotations

import math

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import models


def image_losses(
    logits: tf.Tensor,
    labels: tf.Tensor,
    partners: tf.Tensor | None = None,
    fractions: tf.Tensor | None = None,
    *,
    loss: str = "cross_entropy",
    label_smoothing: float = 0.0,
    class_weights: np.ndarray | None = None,
) -> tf.Tensor:
    """Returns each image's loss, float32 [batch].

    Args:
      logits: [batch, classes].
      labels: int32 [batch]; negative ones mark padding, treated as class 0.
      partners: int32 [batch], labels of the images mixed in; None: images are not mixed.
      fractions: float32 [batch], weights of ``labels`` in the loss; ``partners`` have the rest.
      loss: ``cross_entropy``, of the softmax; or ``binary_cross_entropy``, of each class's sigmoid,
        summed over the classes. Wightman et al. 2021 ("ResNet strikes back") and MosaicML train
        ResNets on ImageNet with it; the latter's composer also sums.
      label_smoothing: probability spread evenly over all classes.
      class_weights: [classes], by which the loss of each label is multiplied, as by Keras'
        ``class_weight``; None: 1.
    """
    function = {"cross_entropy": _cross_entropy, "binary_cross_entropy": _binary_cross_entropy}
    logits = tf.cast(logits, tf.float32)

    def of_labels(labels: tf.Tensor) -> tf.Tensor:
        losses = function[loss](logits, labels, label_smoothing)
        if class_weights is None:
            return losses
        weights = tf.constant(class_weights, tf.float32)
        return losses * tf.gather(weights, tf.maximum(labels, 0))

    if partners is None or fractions is None:
        return of_labels(labels)
    # Either loss is linear in the probabilities of its target.
    return fractions * of_labels(labels) + (1 - fractions) * of_labels(partners)


def class_probabilities(logits: tf.Tensor, loss: str) -> tf.Tensor:
    """Returns the probability of each class that training with a loss makes of logits.

    With ``cross_entropy`` the softmax. With ``binary_cross_entropy`` the sigmoids: each class's
    probability on its own. Their sum is about 1 for images like those of the training, but it need
    not be, and is low for an image of no class.

    Args:
      logits: [batch, classes].
      loss: see :func:`image_losses`.

    Returns:
      Float32 [batch, classes].
    """
    function = {"cross_entropy": tf.nn.softmax, "binary_cross_entropy": tf.nn.sigmoid}[loss]
    return function(tf.cast(logits, tf.float32))


def start_at_equal_probabilities(network: keras.Model) -> None:
    """Sets the initial bias of the last layer for binary cross-entropy, in the strategy's scope.

    It becomes ``-log(classes)``, so the first sigmoids are about ``1 / classes``, as in MosaicML's
    recipes. At a bias of 0 they would be 1/2, and nearly all of the first gradients would go into
    the bias. Networks whose last layer has no bias are left as they are.

    Args:
      network: from ``models.build``.
    """
    head = models.head(network)
    if head is not None and head.use_bias:
        head.bias.assign(tf.fill([head.units], -math.log(head.units)))


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    labels = tf.maximum(labels, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if not label_smoothing:
        return losses
    # The cross-entropy against (1 - s) * one-hot + s / classes.
    uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1 - label_smoothing) * losses + label_smoothing * uniform


def _binary_cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float
) -> tf.Tensor:
    classes = logits.shape[-1]
    targets = tf.one_hot(tf.maximum(labels, 0), classes)
    targets = (1 - label_smoothing) * targets + label_smoothing / classes
    # Class by class: a sum of all softplus(z), less the label's z, would lose the digits of a small
    # loss.
    return tf.reduce_sum(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits), axis=-1
    )
