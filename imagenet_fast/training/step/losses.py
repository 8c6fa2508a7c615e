"""The loss of each image, with label smoothing and mixed labels, and its class probabilities."""

from __future__ import annotations

import math
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.options import ONE_LABEL, UpdateOptions


class Focus(NamedTuple):
    """What focal and asymmetric loss add to the binary cross-entropy of a class.

    With the class's probability p, the loss of an image of the class is ``-positive_weight * (1 -
    p)**positive_gamma * log(p)``; of another ``-negative_weight * q**negative_gamma * log(1 - q)``,
    where q is ``max(p - margin, 0)``. These defaults are binary cross-entropy itself.
    """

    positive_gamma: float = 0.0
    negative_gamma: float = 0.0
    positive_weight: float = 1.0
    negative_weight: float = 1.0
    margin: float = 0.0

    @classmethod
    def of(cls, options: UpdateOptions) -> Focus:
        """Returns that of the configured loss."""
        if options.loss == "focal":
            gamma, alpha = options.focal_gamma, options.focal_alpha
            return cls(gamma, gamma, alpha, 1 - alpha)
        if options.loss == "asymmetric":
            gammas = options.positive_gamma, options.negative_gamma
            return cls(*gammas, margin=options.probability_margin)
        return cls()


def image_losses(
    logits: tf.Tensor,
    labels: tf.Tensor,
    partners: tf.Tensor | None = None,
    fractions: tf.Tensor | None = None,
    *,
    loss: str = "cross_entropy",
    label_smoothing: float = 0.0,
    class_weights: np.ndarray | None = None,
    focus: Focus | None = None,
) -> tf.Tensor:
    """Returns each image's loss, float32 [batch].

    Args:
      logits: [batch, classes].
      labels: int32 [batch]; negative ones mark padding, treated as class 0. Of multi-label data
        int32 [batch, classes], 0 or 1; negative ones, as 0.
      partners: of labels' shape, labels of the images mixed in; None: images are not mixed.
      fractions: float32 [batch], weights of ``labels`` in the loss; ``partners`` have the rest.
      loss: ``cross_entropy``, of the softmax; or ``binary_cross_entropy``, of each class's sigmoid,
        summed over the classes. Wightman et al. 2021 ("ResNet strikes back") and MosaicML train
        ResNets on ImageNet with it; the latter's composer also sums. ``focal`` (Lin et al. 2017,
        "Focal loss for dense object detection") and ``asymmetric`` (Ridnik et al. 2021,
        "Asymmetric loss for multi-label classification") are sums of :class:`Focus`.
      label_smoothing: probability spread evenly over all classes; of multi-label data, over a class
        and its absence, as by Keras' ``BinaryCrossentropy``.
      class_weights: [classes], by which the loss of each label is multiplied, as by Keras'
        ``class_weight``, and of multi-label data by PyTorch's ``pos_weight``; None: 1.
      focus: of focal and asymmetric losses.

    Raises:
      UserError: if cross-entropy, of one class, is given several labels.
    """
    logits, labels = tf.cast(logits, tf.float32), tf.convert_to_tensor(labels)
    multi_label = labels.shape.rank == 2
    if multi_label and loss == "cross_entropy":
        raise UserError(ONE_LABEL)

    def of_labels(labels: tf.Tensor) -> tf.Tensor:
        if multi_label:
            targets = tf.cast(tf.maximum(labels, 0), tf.float32)
            targets = (1 - label_smoothing) * targets + label_smoothing / 2
            return _sigmoid_loss(logits, targets, focus or Focus(), class_weights)
        if loss == "cross_entropy":
            losses = _cross_entropy(logits, labels, label_smoothing)
        else:
            classes = logits.shape[-1]
            targets = tf.one_hot(tf.maximum(labels, 0), classes)
            targets = (1 - label_smoothing) * targets + label_smoothing / classes
            losses = _sigmoid_loss(logits, targets, focus or Focus())
        if class_weights is None:
            return losses
        weights = tf.constant(class_weights, tf.float32)
        return losses * tf.gather(weights, tf.maximum(labels, 0))

    if partners is None or fractions is None:
        return of_labels(labels)
    # Each loss is linear in the probabilities of its target.
    return fractions * of_labels(labels) + (1 - fractions) * of_labels(partners)


def class_probabilities(logits: tf.Tensor, loss: str) -> tf.Tensor:
    """Returns the probability of each class that training with a loss makes of logits.

    With ``cross_entropy`` the softmax. With other losses the sigmoids: each class's probability on
    its own. Their sum is about 1 for images like those of the training, but it need
    not be, and is low for an image of no class.

    Both are [batch, classes].
    """
    function = tf.nn.softmax if loss == "cross_entropy" else tf.nn.sigmoid
    return function(tf.cast(logits, tf.float32))


def start_at_equal_probabilities(network: keras.Model) -> None:
    """Sets the initial bias of the last layer for losses of sigmoids, in the strategy's scope.

    It becomes ``-log(classes)``, so the first sigmoids are about ``1 / classes``, as in MosaicML's
    recipes. At a bias of 0 they would be 1/2, and nearly all of the first gradients would go into
    the bias. Networks whose last layer has no bias are left as they are.
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


def _sigmoid_loss(
    logits: tf.Tensor, targets: tf.Tensor, focus: Focus, class_weights: np.ndarray | None = None
) -> tf.Tensor:
    """Returns the sum of :class:`Focus` over the classes, float32 [batch].

    Args:
      logits: float32 [batch, classes].
      targets: float32 [batch, classes], the fraction of the loss of an image of the class.
      focus: see there.
      class_weights: [classes], of the loss of images of the class; None: 1.
    """
    # In logarithms, which float32 holds where p or 1 - p rounds to 0: log(p) = -softplus(-z).
    negative_log_p, negative_log_rest = tf.nn.softplus(-logits), tf.nn.softplus(logits)
    positive = focus.positive_weight * negative_log_p
    if focus.positive_gamma:
        positive *= tf.exp(-focus.positive_gamma * negative_log_rest)
    if focus.margin:
        above = tf.nn.sigmoid(logits) - focus.margin
        # A power has no gradient at 0.
        q = tf.where(above > 0, above, 0.5)
        negative = -tf.math.log1p(-q) * q**focus.negative_gamma
        negative = focus.negative_weight * tf.where(above > 0, negative, 0.0)
    else:
        negative = focus.negative_weight * negative_log_rest
        if focus.negative_gamma:
            negative *= tf.exp(-focus.negative_gamma * negative_log_p)
    if class_weights is not None:
        positive *= tf.constant(class_weights, tf.float32)
    return tf.reduce_sum(targets * positive + (1 - targets) * negative, axis=-1)
