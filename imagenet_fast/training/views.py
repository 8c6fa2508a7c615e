"""Test-time augmentation: mean outputs over several views of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def mean_over_views(function: Callable[[tf.Tensor], Any], images: tf.Tensor, views: str) -> Any:
    """Returns the mean of what a function returns for the views of images.

    Page 2019 takes the mean logits of an image and the image flipped, Jordan 2024 those of six
    views: of the image, which counts for a half, and of it moved by a pixel to the upper left and
    to the lower right, a quarter each, always with the image flipped. What moves in is the image
    reflected at its border.

    Args:
      function: of images; returns tensors in any structure.
      images: [batch, height, width, channels].
      views: ``none``: the image alone; ``flip`` or ``flip_and_shift``.
    """
    if views == "none":
        return function(images)
    weighted = [(1.0, images)]
    if views == "flip_and_shift":
        # Not tf.pad, which takes no batch of no images, and on GPUs no bytes.
        framed = tf.concat([images[:, 1:2], images, images[:, -2:-1]], 1)
        framed = tf.concat([framed[:, :, 1:2], framed, framed[:, :, -2:-1]], 2)
        weighted = [(0.5, images), (0.25, framed[:, :-2, :-2]), (0.25, framed[:, 2:, 2:])]
    results = [
        tf.nest.map_structure(lambda value, share=share / 2: share * value, function(view))
        for share, one in weighted
        for view in (one, tf.reverse(one, [2]))
    ]
    return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *results)
