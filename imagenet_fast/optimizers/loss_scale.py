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
def without_all_reduce(optimizer: keras.optimizers.Optimizer) -> Iterator[Update]:
    """In the context, an optimizer does not all-reduce gradients: the training step has.

    ``apply`` of Keras 3 would all-reduce them again
    (``keras/src/backend/tensorflow/optimizer.py``, ``_backend_update_step``). All replicas of a
    ``MirroredStrategy`` may be in the context at once, each in a thread of its own.

    Yields:
      A function that updates variables, given all-reduced gradients of the scaled loss.
    """
    inner = unwrapped(optimizer)
    if KERAS_2:
        yield functools.partial(apply_summed_in_keras_2, optimizer, inner)
        return
    parts = getattr(inner, "optimizers", (inner,))  # A MultiOptimizer has several.
    for part in parts:
        _count_without_all_reduce(part, 1)
    try:
        yield optimizer.apply
    finally:
        for part in parts:
            _count_without_all_reduce(part, -1)


def _count_without_all_reduce(optimizer: Any, change: int) -> None:
    """Counts the replicas in the context; the last one to leave it restores the all-reduce."""
    count = getattr(optimizer, "replicas_without_all_reduce", 0) + change
    optimizer.replicas_without_all_reduce = count
    if isinstance(optimizer, SumsFirst):
        return
    if count:
        optimizer._all_reduce_sum_gradients = list
    else:
        del optimizer._all_reduce_sum_gradients  # It hid Keras' method.
