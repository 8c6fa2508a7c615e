"""Strategies with virtual devices, whose programs can be compiled but not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from imagenet_fast.distribute.groups import Groups, consecutive


class VirtualStrategy(tf.distribute.Strategy):
    """A strategy with one replica per virtual device, for compilation by XLA.

    A ``tf.function`` with ``jit_compile=True`` that calls ``run`` becomes one program for all
    replicas, as under ``TPUStrategy``: it reads its replica id at run time, and contains the
    all-reduces. TensorFlow itself cannot run it. Variables are plain ones, as on each device.

    Attributes:
      coordinates: (x, y, ...) of each replica's device.
      device_type: TensorFlow's name, ``TPU`` or ``GPU``.
    """

    device_type = ""

    def __init__(self, coordinates: Sequence[Sequence[int]]) -> None:
        self.coordinates = [tuple(place) for place in coordinates]
        # Not super(), which for VirtualGPUStrategy is OneDeviceStrategy.
        tf.distribute.Strategy.__init__(self, _Extended(self, len(self.coordinates)))


class VirtualTPUStrategy(VirtualStrategy):
    """Virtual TPU cores; coordinates are (x, y, z, core)."""

    device_type = "TPU"


class VirtualGPUStrategy(VirtualStrategy, tf.distribute.OneDeviceStrategy):
    """Virtual GPUs; coordinates are (index in the host, host).

    A subclass of ``OneDeviceStrategy``, because each replica has its own variables, and the type
    decides whether losses are scaled (``training/build/model.py``).
    """

    device_type = "GPU"

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len({place[1] for place in self.coordinates})


def xla_sum(tensor: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Returns the differentiable sum of a tensor over the replica's group, in an XLA program.

    ``XlaAllReduce`` compiles in any build of TensorFlow (2.21; not 2.15), while ``CrossReplicaSum``
    needs TensorFlow for TPUs. The operation itself has no gradient.
    """

    @tf.custom_gradient
    def differentiable(local: tf.Tensor) -> tuple[tf.Tensor, object]:
        total = gen_xla_ops.xla_all_reduce(
            input=local, group_assignment=groups.members, reduce_op="Add", mode="CrossReplica"
        )
        return total, lambda gradient: xla_sum(gradient, groups)

    return differentiable(tensor)


class _Extended(OneDeviceExtended):
    """The strategy's implementation; ``OneDeviceExtended`` creates and updates variables."""

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
