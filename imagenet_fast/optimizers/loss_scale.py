"""Losses and gradients of optimizers with or without a loss scale."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def update_by_sums(optimizer: keras.optimizers.Optimizer) -> Iterator[Update]:
    """In the context, an optimizer takes gradients that are already summed over the replicas.

    ``apply`` of Keras 3 would sum them once more, by the strategy's all-reduce
    (``keras/src/backend/tensorflow/optimizer.py``, ``_backend_update_step``). Replicas of a
    ``MirroredStrategy`` are in the context together, and so may be threads that Keras starts there.

    Yields:
      What updates variables by gradients of the scaled loss, summed over the replicas.
    """
    inner = unwrapped(optimizer)
    if KERAS_2:
        yield functools.partial(apply_summed_in_keras_2, optimizer, inner)
        return
    parts = getattr(inner, "optimizers", (inner,))  # A MultiOptimizer has several.
    for part in parts:
        _count_updates_by_sums(part, 1)
    try:
        yield optimizer.apply
    finally:
        for part in parts:
            _count_updates_by_sums(part, -1)


def _count_updates_by_sums(optimizer: Any, change: int) -> None:
    """Counts the replicas that give an optimizer sums; while there are any, it makes none."""
    optimizer.updates_by_sums = getattr(optimizer, "updates_by_sums", 0) + change
    if isinstance(optimizer, SumsFirst):
        return
    if optimizer.updates_by_sums:
        optimizer._all_reduce_sum_gradients = list
    else:
        del optimizer._all_reduce_sum_gradients  # Keras' method is there again.
