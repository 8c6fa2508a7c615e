"""How much an optimizer keeps."""

from __future__ import annotations

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
