"""Strategies for programs of accelerators that are not there: they can be compiled, but not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from imagenet_fast.distribute.groups import Groups, consecutive


class VirtualStrategy(tf.distribute.Strategy):
    """Has as many replicas as there would be devices, in the programs that XLA makes of ``run``.

    Such a program is the same for all replicas, as those of a ``TPUStrategy`` are: it finds out
    while it runs which one it is, and all-reduces are part of it. It is made of a ``tf.function``
    with ``jit_compile=True`` that calls ``run``, for its compiler alone: TensorFlow itself cannot
    run it. Variables are plain ones, as each device has them.

    Args:
      coordinates: (x, y, ...) of each replica's device.

    Attributes:
      coordinates: the same.
      device_type: ``TPU`` or ``GPU``, as TensorFlow names them.
    """

    device_type = ""

    def __init__(self, coordinates: Sequence[Sequence[int]]) -> None:
        self.coordinates = [tuple(place) for place in coordinates]
        # Not super(): of OneDeviceStrategy, from which one kind inherits, only the type is wanted.
        tf.distribute.Strategy.__init__(self, _Extended(self, len(self.coordinates)))


class VirtualTPUStrategy(VirtualStrategy):
    """Stands for a TPU; coordinates are (x, y, z, core)."""

    device_type = "TPU"


class VirtualGPUStrategy(VirtualStrategy, tf.distribute.OneDeviceStrategy):
    """Stands for GPUs; coordinates are (GPU of its host, host).

    By its type Keras knows (``strategy_supports_loss_scaling`` of
    ``mixed_precision/loss_scale_optimizer.py``) that each replica has variables of its own, as one
    device has, so that loss scaling is right.
    """

    device_type = "GPU"

    @property
    def hosts(self) -> int:
        """How many hosts have the GPUs."""
        return len({place[1] for place in self.coordinates})


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

    def __init__(self, strategy: VirtualStrategy, replicas: int) -> None:
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
