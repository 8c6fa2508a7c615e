"""Test-time augmentation: outputs averaged over several views of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def mean_over_views(function: Callable[[tf.Tensor], Any], images: tf.Tensor, views: str) -> Any:
    """Returns the mean of a function's results over the views of images.

    Page 2019 averages the logits of an image and its mirror image. Jordan 2024 averages those of
    six views: the image (weight 1/2), and the image shifted by a pixel to the upper left and to the
    lower right (1/4 each), all with their mirror images. Borders are filled by reflection.

    Args:
      function: takes images; returns tensors in any structure.
      images: [batch, height, width, channels].
      views: ``none``: the image alone; ``flip`` or ``flip_and_shift``.
    """
    if views == "none":
        return function(images)
    weighted = [(1.0, images)]
    if views == "flip_and_shift":
        # tf.pad fails on an empty batch and, on GPUs, on uint8.
        framed = tf.concat([images[:, 1:2], images, images[:, -2:-1]], 1)
        framed = tf.concat([framed[:, :, 1:2], framed, framed[:, :, -2:-1]], 2)
        weighted = [(0.5, images), (0.25, framed[:, :-2, :-2]), (0.25, framed[:, 2:, 2:])]
    results = [
        tf.nest.map_structure(lambda value, weight=weight / 2: weight * value, function(view))
        for weight, shifted in weighted
        for view in (shifted, tf.reverse(shifted, [2]))
    ]
    return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *results)
