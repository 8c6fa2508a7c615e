"""Work on variables that all replicas do by one call, however many replicas and variables.

Outside of functions, TensorFlow assigns a value to a distributed variable replica by replica: one
operation for each replica (``MirroredExtended._update`` and ``TPUExtended._update``,
``values_util.assign_on_each_device``), which on a TPU slice is a message to another host. A slice
of 2,048 cores would get 600,000 of them to swap the weights of a ResNet-50 with their averages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def one_call(
    strategy: tf.distribute.Strategy, function: Callable[..., None]
) -> Callable[..., None]:
    """Returns a function that has each replica run ``function``, all of them by one call.

    It is to be called outside of replicas; it traces ``function`` in its first call.

    Args:
      strategy: of the replicas.
      function: called in each replica; what it does to variables it does to this replica's copies.
        Its arguments are tensors, or nested sequences of them, that are the same in all replicas.
    """
    # A partial function of its own: of one text, TensorFlow would take them for a single function
    # that it traces again and again, and warn.
    program = tf.function(functools.partial(_run, strategy, function), autograph=False)
    # Behind a plain function: a SavedModel traces attributes that are tf.functions.
    return lambda *arguments: program(*arguments)


def _run(strategy: tf.distribute.Strategy, function: Callable[..., None], *arguments: Any) -> None:
    strategy.run(function, args=arguments)


def own_values(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Returns the values of a replica's own copies; to be called in the replica."""
    # Not converted to tensors: of some variables that would read all replicas' values.
    return [variable.read_value() for variable in variables]


def assign_own(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Sets a replica's own copies of variables; to be called in the replica.

    Variables themselves take no assignment in a replica unless they say how the replicas' values
    are combined.
    """
    for variable, value in zip(variables, values):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def assign_everywhere(
    strategy: tf.distribute.Strategy,
    variables: Sequence[tf.Variable],
    values: Sequence[np.ndarray | tf.Tensor | float],
) -> None:
    """Sets all replicas' copies of variables, by one call; outside of replicas.

    Args:
      strategy: in whose scope the variables were made.
      variables: to be set.
      values: of their shapes.

    Raises:
      ValueError: if a value is of another shape than its variable.
    """
    tensors = [tf.convert_to_tensor(v, own.dtype.base_dtype) for own, v in zip(variables, values)]
    for variable, tensor in zip(variables, tensors):
        variable.shape.assert_is_compatible_with(tensor.shape)
    one_call(strategy, functools.partial(assign_own, variables))(tensors)
