"""Losses and gradients of optimizers with or without a loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2, apply_summed_in_keras_2
from imagenet_fast.distribute.sums_first import SumsFirst
from imagenet_fast.optimizers.slots import unwrapped

# Takes gradients and their variables.
Update = Callable[[Sequence[tf.Tensor], Sequence[Any]], None]


def scaled_loss(optimizer: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's loss scale, if it has one."""
    if not KERAS_2:
        return optimizer.scale_loss(loss)
    scaled = getattr(optimizer, "get_scaled_loss", None)
    return scaled(loss) if scaled else loss


def with_loss_scale(
    optimizer: keras.optimizers.Optimizer, scale: float
) -> keras.optimizers.Optimizer:
    """Returns an optimizer with a fixed loss scale; 0: a dynamic one."""
    if not scale:
        return keras.mixed_precision.LossScaleOptimizer(optimizer)
    if KERAS_2:
        return keras.mixed_precision.LossScaleOptimizer(
            optimizer, dynamic=False, initial_scale=scale
        )
    optimizer.loss_scale_factor = scale
    return optimizer


def update_by_sums(optimizer: keras.optimizers.Optimizer) -> Update:
    """Makes an optimizer leave the sum over the replicas to its caller.

    ``apply`` of Keras 3 would sum the gradients once more, by the strategy's all-reduce
    (``keras/src/backend/tensorflow/optimizer.py``, ``_backend_update_step``).

    Returns:
      What updates variables by gradients of the scaled loss that are summed over the replicas.
    """
    inner = unwrapped(optimizer)
    if KERAS_2:
        return functools.partial(apply_summed_in_keras_2, optimizer, inner)
    if isinstance(inner, SumsFirst):
        inner.sum_over_replicas = _as_they_are  # type: ignore[method-assign]
    else:
        inner._all_reduce_sum_gradients = list
    return optimizer.apply


def _as_they_are(gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
    del variables
    return gradients
