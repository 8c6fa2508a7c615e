"""Losses and gradients of optimizers with or without a loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2, apply_summed_in_keras_2
from imagenet_fast.distribute.sums_first import SumsFirst
from imagenet_fast.optimizers.slots import unwrapped


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


def leave_sums_to_the_step(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer take gradients that are already summed over the replicas.

    ``apply`` of Keras 3 would sum them once more, by the strategy's all-reduce
    (``keras/src/backend/tensorflow/optimizer.py``, ``_backend_update_step``).
    """
    if not KERAS_2:
        inner = unwrapped(optimizer)
        if isinstance(inner, SumsFirst):
            inner.sum_over_replicas = _as_they_are  # type: ignore[method-assign]
        else:
            inner._all_reduce_sum_gradients = list


def _as_they_are(gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
    del variables
    return gradients


def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[Any],
) -> None:
    """Updates variables by gradients of the scaled loss that are summed over the replicas.

    After :func:`leave_sums_to_the_step`.
    """
    if KERAS_2:
        apply_summed_in_keras_2(optimizer, unwrapped(optimizer), gradients, variables)
    else:
        optimizer.apply(gradients, variables)
