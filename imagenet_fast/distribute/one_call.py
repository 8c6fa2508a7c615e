"""Work on variables that all replicas do by one call, however many replicas and variables.

Outside of functions, TensorFlow assigns a value to a distributed variable replica by replica: one
operation for each replica (``MirroredExtended._update`` and ``TPUExtended._update``,
``values_util.assign_on_each_device``), which on a TPU slice is a message to another host. A slice
of 2,048 cores would get 600,000 of them to swap the weights of a ResNet-50 with their averages.
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
    # Not as arguments of ``run``, of which TensorFlow passes each replica its own.
    strategy.run(lambda: function(*arguments))


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
    variables: Sequence[tf.Variable], values: Sequence[np.ndarray | tf.Tensor | float]
) -> None:
    """Sets all replicas' copies of variables, by one call; outside of replicas.

    Args:
      variables: of one strategy.
      values: of their shapes.

    Raises:
      ValueError: if a value is of another shape than its variable.
    """
    tensors = []
    for variable, value in zip(variables, values):
        tensors.append(tf.convert_to_tensor(value, variable.dtype.base_dtype))
        variable.shape.assert_is_compatible_with(tensors[-1].shape)
    found = (getattr(variable, "distribute_strategy", None) for variable in variables)
    strategy = next(filter(None, found), None) or tf.distribute.get_strategy()
    one_call(strategy, functools.partial(assign_own, variables))(tensors)


@contextlib.contextmanager
def first_copies_read(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Inside, who reads these variables outside of replicas gets the first replica's values.

    For variables that are the same in all replicas: TensorFlow would read the copies of all, to
    take the mean (``SyncOnReadVariable._get_cross_replica``).
    """
    before = [own.aggregation for own in variables]
    for own in variables:
        own._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    try:
        yield
    finally:
        for own, aggregation in zip(variables, before):
            own._aggregation = aggregation


@contextlib.contextmanager
def restored_everywhere(checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Inside, what is restored of distributed variables is kept, and in the end set by one call.

    TensorFlow would assign them replica by replica, or, where the variables are on several hosts,
    make a graph with a node for each replica and variable (``MultiDeviceSaver.restore``,
    ``values_util.get_on_write_restore_ops``).

    Args:
      checkpoint: of the variables, which are of one strategy.
    """
    everything = tf.train.TrackableView(checkpoint).descendants()
    distributed = [own for own in everything if isinstance(own, tf.distribute.DistributedValues)]
    restored: dict[int, tf.Tensor] = {}
    for place, own in enumerate(distributed):
        own._gather_saveables_for_checkpoint = functools.partial(_kept, own, place, restored)
    try:
        yield
    finally:
        for own in distributed:
            del own._gather_saveables_for_checkpoint
    if restored:
        assign_everywhere([distributed[place] for place in restored], list(restored.values()))


def _kept(
    variable: tf.Variable, place: int, restored: dict[int, tf.Tensor]
) -> dict[str, Callable[..., SaveableObject]]:
    return {VARIABLE_VALUE_KEY: functools.partial(_Kept, variable, place, restored)}


class _Kept(SaveableObject):
    """Has a checkpoint's value for a variable kept rather than assigned."""

    def __init__(
        self, variable: tf.Variable, place: int, restored: dict[int, tf.Tensor], name: str = ""
    ) -> None:
        # On this host: of values that are all for one host TensorFlow makes no function, out of
        # which none could be kept.
        with tf.device("CPU:0"):
            device = tf.zeros([]).device
        spec = SaveSpec(variable.read_value, "", name, variable.dtype, device)
        super().__init__(variable, [spec], name)
        self._variable, self._place, self._restored = variable, place, restored

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> tf.Operation:
        if tf.executing_eagerly():
            (self._restored[self._place],) = restored_tensors
            return tf.no_op()
        # Something else in the checkpoint is on another host.
        gather = type(self._variable)._gather_saveables_for_checkpoint
        own = gather(self._variable)[VARIABLE_VALUE_KEY](name=self.name)
        return own.restore(restored_tensors, restored_shapes)
