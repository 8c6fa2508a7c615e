"""Losses and gradients of optimizers with or without a loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.optimizers.slots import unwrapped


def scaled_loss(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer, loss: tf.Tensor
) -> tf.Tensor:
    """Returns the loss times the optimizer's loss scale, if it has one."""
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        return optimizer.get_scaled_loss(loss)
    return loss


def apply_gradients(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
) -> None:
    """Updates variables by gradients that are already summed over the replicas.

    Args:
      optimizer: of any kind.
      gradients: of the scaled loss.
      variables: in the order of the gradients.
    """
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
    aggregated: dict[str, bool] = {"skip_gradients_aggregation": True}
    if isinstance(unwrapped(optimizer), keras.optimizers.legacy.Optimizer):
        aggregated = {"experimental_aggregate_gradients": False}  # as in TensorFlow Addons
    optimizer.apply_gradients(zip(gradients, variables), **aggregated)
