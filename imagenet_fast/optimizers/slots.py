"""Optimizer slots: their size, and making them before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tf_keras as keras

_SIZE = 256


def values_kept(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the number of slot values that an optimizer has for each weight, such as momentum.

    Measured by updating a [256, 256] matrix: factored optimizers such as Adafactor, with slots for
    rows and columns, have less than one value.

    Args:
      optimizer: an unused one, of no further use.
    """
    matrix = tf.Variable(tf.zeros([_SIZE, _SIZE]))
    optimizer.apply_gradients([(tf.zeros_like(matrix), matrix)])
    # Scalars count steps.
    shapes = [slot.shape for slot in optimizer.variables() if slot.shape.rank]
    return sum(shape.num_elements() for shape in shapes) / _SIZE**2


def unwrapped(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
) -> keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer:
    """Returns the optimizer inside a ``LossScaleOptimizer``, or the given one if it is none."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def make_slots(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
    variables: Sequence[tf.Variable],
) -> None:
    """Makes an optimizer's variables, which it would otherwise make in its first step.

    Args:
      optimizer: of any kind, with or without a loss scale.
      variables: the trainable ones, in the order of the gradients.
    """
    inner = unwrapped(optimizer)
    if isinstance(inner, keras.optimizers.legacy.Optimizer):  # TensorFlow Addons
        inner._create_all_weights(variables)
    else:
        optimizer.build(variables)
