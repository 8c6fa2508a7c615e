"""Operations on all replicas' variables in one call, for any number of replicas and variables.

Outside of functions, TensorFlow assigns a distributed variable by one operation per replica
(``MirroredExtended._update`` and ``TPUExtended._update``, ``values_util.assign_on_each_device``),
which on a TPU slice is a message to another host: 600,000 messages to swap the weights of a
ResNet-50 with their averages on 2,048 cores.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from imagenet_fast.base.keras_2 import tensorflow_variables


def one_call(
    strategy: tf.distribute.Strategy, function: Callable[..., None]
) -> Callable[..., None]:
    """Returns a function that runs ``function`` in all replicas, by one call.

    Call the result outside of replicas; its first call traces ``function``.

    Args:
      strategy: the replicas' strategy.
      function: called in each replica, where it uses this replica's copies of variables. Its
        arguments are tensors, or nested sequences of them, with the same values in all replicas.
    """
    # A new partial function each time: TensorFlow identifies functions by their source code, and
    # would warn of retracing.
    program = tf.function(functools.partial(_run, strategy, function), autograph=False)
    # In a lambda, because a SavedModel would trace attributes that are tf.functions.
    return lambda *arguments: program(*arguments)


def _run(strategy: tf.distribute.Strategy, function: Callable[..., None], *arguments: Any) -> None:
    # Not as arguments of ``run``, which would split per-replica values.
    strategy.run(lambda: function(*arguments))


def local_variable(value: tf.Tensor | tf.Variable, name: str) -> tf.Variable:
    """Returns a variable of which each replica has a copy of its own, in the strategy's scope."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )


def local_values(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Returns the values of the replica's copies of variables, in replica context."""
    # read_value(), because tf.convert_to_tensor would read all replicas' copies of some variables.
    return [variable.read_value() for variable in tensorflow_variables(variables)]


def assign_local(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns the replica's copies of variables, in replica context.

    By the raw operation, because variables without an ``aggregation`` refuse assignments in a
    replica.
    """
    for variable, value in zip(tensorflow_variables(variables), values):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def assign_everywhere(
    variables: Sequence[tf.Variable], values: Sequence[np.ndarray | tf.Tensor | float]
) -> None:
    """Assigns all replicas' copies of a strategy's variables in one call, outside of replicas.

    Raises:
      ValueError: if a value does not have its variable's shape.
    """
    variables, tensors = tensorflow_variables(variables), []
    for variable, value in zip(variables, values):
        tensors.append(tf.convert_to_tensor(value, variable.dtype.base_dtype))
        variable.shape.assert_is_compatible_with(tensors[-1].shape)
    strategies = (getattr(variable, "distribute_strategy", None) for variable in variables)
    strategy = next(filter(None, strategies), None) or tf.distribute.get_strategy()
    one_call(strategy, functools.partial(assign_local, variables))(tensors)


@contextlib.contextmanager
def read_from_first_replica(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Makes reads of these variables outside of replicas return the first replica's values.

    For variables with the same values in all replicas. TensorFlow would read all replicas' copies
    and average them (``SyncOnReadVariable._get_cross_replica``).
    """
    variables = tensorflow_variables(variables)
    before = [variable.aggregation for variable in variables]
    for variable in variables:
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, before):
            variable._aggregation = aggregation


@contextlib.contextmanager
def restored_everywhere(checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Collects the distributed variables restored in the context, and assigns them in one call.

    TensorFlow would assign them replica by replica or, if variables are on several hosts, build a
    graph with a node per replica and variable (``MultiDeviceSaver.restore``,
    ``values_util.get_on_write_restore_ops``).
    """
    objects = tf.train.TrackableView(checkpoint).descendants()
    distributed = [value for value in objects if isinstance(value, tf.distribute.DistributedValues)]
    restored: dict[int, tf.Tensor] = {}
    for index, variable in enumerate(distributed):
        saveables = {VARIABLE_VALUE_KEY: functools.partial(_Collected, variable, index, restored)}
        variable._gather_saveables_for_checkpoint = functools.partial(dict, saveables)
    try:
        yield
    finally:
        for variable in distributed:
            del variable._gather_saveables_for_checkpoint
    if restored:
        assign_everywhere([distributed[index] for index in restored], list(restored.values()))


class _Collected(SaveableObject):
    """Collects a variable's restored value instead of assigning it."""

    def __init__(
        self, variable: tf.Variable, index: int, restored: dict[int, tf.Tensor], name: str = ""
    ) -> None:
        # On this host: if all values are for one host, TensorFlow restores them eagerly, and not in
        # a function, out of which no value could be collected.
        with tf.device("CPU:0"):
            device = tf.zeros([]).device
        spec = SaveSpec(variable.read_value, "", name, variable.dtype, device)
        super().__init__(variable, [spec], name)
        self._variable, self._index, self._restored = variable, index, restored

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> tf.Operation:
        if tf.executing_eagerly():
            (self._restored[self._index],) = restored_tensors
            return tf.no_op()
        # In a function, because another object in the checkpoint is on another host.
        gather = type(self._variable)._gather_saveables_for_checkpoint
        saveable = gather(self._variable)[VARIABLE_VALUE_KEY](name=self.name)
        return saveable.restore(restored_tensors, restored_shapes)
