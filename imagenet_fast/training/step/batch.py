"""Batches as Keras' data give them, checked and with the model's numbers of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError


def is_step_number(data: Any) -> bool:
    """Returns whether an element of the data is a step number instead of a batch."""
    return isinstance(data, Mapping) and set(data) == {"step"}


def renumbered(labels: tf.Tensor, numbers: Sequence[int], classes: int) -> tf.Tensor:
    """Returns labels with the model's numbers of classes; negative ones, of padding, stay.

    Args:
      labels: int32 [batch], or [batch, classes of the data].
      numbers: the model's number of each class of the data.
      classes: of the model.
    """
    if labels.shape.rank == 1:
        new = tf.gather(tf.constant(numbers, tf.int32), tf.maximum(labels, 0))
        return tf.where(labels < 0, labels, new)
    places = tf.constant(numbers, tf.int32)[:, tf.newaxis]
    shape = [classes, tf.shape(labels)[0]]
    new = tf.transpose(tf.scatter_nd(places, tf.transpose(labels), shape))
    return tf.where(labels[:, :1] < 0, labels[:, :1], new)


def unpacked(data: Any, multi_label: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the images, int32 labels and float32 weights [batch] of Keras' data.

    Args:
      data: of Keras, with or without weights, which are 1 then.
      multi_label: whether labels may be [batch, classes]; otherwise they are [batch].

    Raises:
      UserError: if labels or weights are not one for each image.
    """
    images, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
    labels = tf.convert_to_tensor(labels)
    if not multi_label or labels.shape.rank != 2 or labels.shape[1] == 1:
        labels = per_image("labels are class numbers", labels)
    if weights is None:
        weights = tf.ones(tf.shape(labels)[:1])
    else:
        weights = per_image("weights are", weights)
    return images, tf.cast(labels, tf.int32), tf.cast(weights, tf.float32)


def per_image(what: str, values: tf.Tensor) -> tf.Tensor:
    """Returns [batch] or [batch, 1] as [batch].

    Raises:
      UserError: if the values, which ``what`` names, have another shape.
    """
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 2 and values.shape[1] == 1:
        return tf.squeeze(values, axis=1)
    if values.shape.rank != 1:
        raise UserError(f"{what} [batch], but got {values.shape}: one for each image")
    return values
