"""A strategy whose replicas are pipelines: one per worker process, on several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import UpdateContext
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from imagenet_fast.distribute.cluster import place_of
from imagenet_fast.distribute.collectives import Communicator


class PipelineStrategy(tf.distribute.Strategy):
    """All-reduces over workers; the model itself places its variables on devices.

    Attributes:
      workers: the strategy that connects the workers, each of which is one replica; None: one
        process.
    """

    def __init__(self, workers: tf.distribute.MultiWorkerMirroredStrategy | None = None) -> None:
        self.workers = workers
        super().__init__(_Extended(self, workers))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver | None:
        """The workers' cluster resolver, or None with one process."""
        return self.workers.cluster_resolver if self.workers else None


class _Extended(OneDeviceExtended):
    """The strategy's implementation: ``OneDeviceStrategy`` without its device."""

    def __init__(
        self,
        strategy: PipelineStrategy,
        workers: tf.distribute.MultiWorkerMirroredStrategy | None,
    ) -> None:
        super().__init__(strategy, "CPU:0")
        self._count, self._index = place_of(workers.cluster_resolver if workers else None)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._count

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **options: Any) -> Any:
        if options.get("colocate_with") is not None:
            return super()._create_variable(next_creator, **options)
        options.pop("colocate_with", None)
        return next_creator(**options)

    def _distribute_datasets_from_function(
        self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any
    ) -> tf.data.Dataset:
        return make(tf.distribute.InputContext(self._count, self._index, self._count))

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with tf.distribute.ReplicaContext(self._container_strategy(), self._index):
            return fn(*args, **kwargs)

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        return dataset

    def _update(
        self, var: tf.Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        return self._update_on(var.device, fn, (var, *args), kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        return self._update_on("CPU:0", fn, args, kwargs, group)

    def _update_on(
        self, device: str, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        with tf.device(device), UpdateContext(device):
            result = fn(*args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any
    ) -> Any:
        if self._count == 1:
            return value
        with tf.device("CPU:0"):
            total = self._communicator().all_reduce(tf.convert_to_tensor(value), "pipelines")
        return total / self._count if reduce_op == tf.distribute.ReduceOp.MEAN else total

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        value = tf.convert_to_tensor(value)
        if self._count == 1:
            return value
        if axis:
            raise NotImplementedError(f"pipelines gather along axis 0, not {axis}")
        with tf.device("CPU:0"):
            gathered = self._communicator().all_gather(tf.reshape(value, [-1]), "pipelines")
        return tf.reshape(gathered, [-1, *value.shape[1:]])

    def _communicator(self) -> Communicator:
        # A place that no stage has: TensorFlow binds a group to its first devices, and those of
        # stages may be GPUs.
        return Communicator(range(self._count), self._index, place=-1)
