"""Optimizer slots: their size, and making them before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2, new_variable, tensorflow_variables

_SIZE = 256


def values_kept(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the number of slot values that an unused optimizer has for each weight, as momentum.

    Measured by updating a [256, 256] matrix: factored optimizers such as Adafactor, with slots for
    rows and columns, have less than one value.

    The optimizer is of no further use.
    """
    matrix = new_variable(tf.zeros([_SIZE, _SIZE]))
    optimizer.apply_gradients([(tf.zeros([_SIZE, _SIZE]), matrix)])
    slots = variables_of(optimizer)
    # Scalars count steps.
    return sum(math.prod(slot.shape) for slot in slots if len(slot.shape)) / _SIZE**2


def variables_of(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Returns an optimizer's variables: slots, steps, and what a loss scale needs."""
    own = optimizer.variables
    return tensorflow_variables(own() if callable(own) else own)  # the former in Keras 2


def state_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what of an optimizer is in checkpoints."""
    return optimizer if KERAS_2 else variables_of(optimizer)


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside a ``LossScaleOptimizer``, or the given one if it is none."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def check_scope(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Checks that an optimizer was made in the scope of a strategy.

    Raises:
      UserError: if it was not: a training step would fail.
    """
    if KERAS_2:  # whose optimizers make them in the first step
        return
    (steps,) = tensorflow_variables([unwrapped(optimizer).iterations])
    if not strategy.extended.variable_created_in_scope(steps):
        raise UserError(
            "the optimizer was not made in the scope of the model's strategy: make it in `with "
            "model.distribute_strategy.scope():`, or give its name"
        )


def make_slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Makes an optimizer's variables, which it would otherwise make in its first step.

    ``variables`` are in the order of the gradients.
    """
    create = getattr(unwrapped(optimizer), "_create_all_weights", None)
    if create:  # TensorFlow Addons
        create(variables)
    elif not getattr(optimizer, "built", False):  # Keras 2 checks it itself
        optimizer.build(variables)
