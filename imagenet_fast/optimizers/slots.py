"""What an optimizer keeps of each weight."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tf_keras as keras

_SIZE = 256


def values_kept(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns how many values an optimizer keeps of each weight, as momentum.

    It is made to update a matrix of [256, 256]: one that keeps sums over rows and columns, as
    Adafactor, keeps less than a value of each.

    Args:
      optimizer: one that is not used for anything else.
    """
    matrix = tf.Variable(tf.zeros([_SIZE, _SIZE]))
    optimizer.apply_gradients([(tf.zeros_like(matrix), matrix)])
    # Others count steps.
    kept = [own.shape for own in optimizer.variables() if own.shape.rank]
    return sum(own.num_elements() for own in kept) / _SIZE**2


def unwrapped(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
) -> keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer:
    """Returns the optimizer that mixed_float16 wraps for its loss scale; else the one given."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def make_slots(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
    variables: Sequence[tf.Variable],
) -> None:
    """Makes an optimizer's variables, which it otherwise makes in its first step.

    Args:
      optimizer: of any kind, with a loss scale or without.
      variables: the trained ones, in the order of the gradients that it will get.
    """
    inner = unwrapped(optimizer)
    if isinstance(inner, keras.optimizers.legacy.Optimizer):  # those of TensorFlow Addons
        inner._create_all_weights(variables)
    else:
        optimizer.build(variables)
