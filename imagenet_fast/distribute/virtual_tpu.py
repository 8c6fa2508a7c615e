"""A strategy for programs of a TPU that is not there: they can be compiled, but not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from imagenet_fast.distribute.groups import Groups, consecutive


class VirtualTPUStrategy(tf.distribute.Strategy):
    """Has as many replicas as a TPU has cores, in the programs that XLA makes of ``run``.

    Such a program is the same for all replicas, as those of a ``TPUStrategy`` are: it finds out
    while it runs which one it is, and sums over replicas are part of it. It is made of a
    ``tf.function`` with ``jit_compile=True`` that calls ``run``, for its compiler alone:
    TensorFlow itself cannot run it. Variables are plain ones, as each core has them.

    Args:
      coordinates: (x, y, ...) of each replica's core.

    Attributes:
      coordinates: the same.
    """

    def __init__(self, coordinates: Sequence[Sequence[int]]) -> None:
        self.coordinates = [tuple(place) for place in coordinates]
        super().__init__(_Extended(self, len(self.coordinates)))


def xla_sum(tensor: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Returns the sum of the tensors of a group's replicas, in a program of XLA.

    Unlike ``CrossReplicaSum``, of which only TensorFlow for TPUs can make one, this can be made by
    any TensorFlow (of 2.21; 2.15 cannot). The operation itself has no gradient.
    """

    @tf.custom_gradient
    def differentiable(own: tf.Tensor) -> tuple[tf.Tensor, object]:
        total = gen_xla_ops.xla_all_reduce(
            input=own, group_assignment=groups.members, reduce_op="Add", mode="CrossReplica"
        )
        return total, lambda gradient: xla_sum(gradient, groups)

    return differentiable(tensor)


class _Extended(OneDeviceExtended):
    """What the strategy does, for Keras and ``tf.distribute``.

    Of ``OneDeviceStrategy`` it is the part that makes variables and updates them.
    """

    def __init__(self, strategy: VirtualTPUStrategy, replicas: int) -> None:
        super().__init__(strategy, "CPU:0")
        self._replicas = replicas

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._replicas

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        replica = gen_xla_ops.xla_replica_id()
        with tf.distribute.ReplicaContext(self._container_strategy(), replica):
            return fn(*args, **kwargs)

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any
    ) -> tf.Tensor:
        everyone = consecutive(self._replicas, self._replicas)
        total = xla_sum(tf.convert_to_tensor(value), everyone)
        return total / self._replicas if reduce_op == tf.distribute.ReduceOp.MEAN else total
