"""Test-time augmentation: outputs averaged over several views of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from imagenet_fast.data.on_device import gather
from imagenet_fast.training.step.losses import class_probabilities
from imagenet_fast.training.step.micro_batches import images_in

# The image itself, and each of two shifted ones; all with their mirror images.
_WEIGHTS = {"flip_and_shift": (1 / 2, 1 / 4), "flip_and_shift_equally": (1 / 3, 1 / 3)}


def mean_over_views(function: Callable[[tf.Tensor], Any], images: tf.Tensor, views: str) -> Any:
    """Returns the mean of a function's results over the views of images.

    Page 2019 averages the logits of an image and its mirror image. Jordan 2024 averages those of
    six views: the image (weight 1/2), and the image shifted by a pixel to the upper left and to the
    lower right (1/4 each), all with their mirror images. Borders are filled by reflection.

    Args:
      function: takes images; returns tensors in any structure.
      images: [batch, height, width, channels].
      views: ``none``: the image alone; ``flip``; ``flip_and_shift``; or ``flip_and_shift_equally``,
        with weight 1/6 for each of the six views.
    """
    if views == "none":
        return function(images)
    weighted = [(1.0, images)]
    if views in _WEIGHTS:
        centre, shifted = _WEIGHTS[views]
        # tf.pad fails on an empty batch and, on GPUs, on uint8.
        framed = tf.concat([images[:, 1:2], images, images[:, -2:-1]], 1)
        framed = tf.concat([framed[:, :, 1:2], framed, framed[:, :, -2:-1]], 2)
        weighted = [(centre, images), (shifted, framed[:, :-2, :-2]), (shifted, framed[:, 2:, 2:])]
    results = [
        tf.nest.map_structure(lambda value, weight=weight / 2: weight * value, function(view))
        for weight, moved in weighted
        for view in (moved, tf.reverse(moved, [2]))
    ]
    return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *results)


def logits_over_views(
    function: Callable[[tf.Tensor], tf.Tensor],
    images: tf.Tensor,
    views: str,
    fraction: float = 1.0,
    weights: tf.Tensor | None = None,
    loss: str = "cross_entropy",
) -> tf.Tensor:
    """Returns logits, averaged over views for the images of a batch that are least certain.

    An image is certain if the largest probability of its own logits is high. Hiverge's speedrun of
    CIFAR-10 (2025) averages over the views of a quarter of the test set; here it is a part of each
    batch, so the result depends on the batches.

    Args:
      function: from images to logits, float [batch, classes].
      images: [batch, height, width, channels].
      views: as in :func:`mean_over_views`.
      fraction: of the batch, rounded to whole images, at least one; 1: all images, whose own logits
        alone are then not computed.
      weights: [batch]; images of weight 0, as padding, count as certain. None: there are none.
      loss: of the training, see :func:`class_probabilities`.
    """
    if views == "none" or fraction == 1:
        return mean_over_views(function, images, views)
    logits = function(images)
    certainty = tf.reduce_max(class_probabilities(logits, loss), axis=1)
    if weights is not None:
        certainty = tf.where(weights > 0, certainty, 2.0)
    _, uncertain = tf.math.top_k(-certainty, images_in(images, fraction))
    averaged = mean_over_views(function, gather(images, uncertain), views)
    return tf.tensor_scatter_nd_update(logits, uncertain[:, tf.newaxis], averaged)
