"""A differentiable sum over a group of replicas, under any strategy."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import straddles
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.tpu import compiles_all_reduces, cross_replica_sum
from imagenet_fast.distribute.workers import collective_hint


def group_sum(tensor: tf.Tensor, groups: Groups, name: str) -> tf.Tensor:
    """Returns the sum of a tensor over the replica's group.

    For replica context: inside ``strategy.run``, or in a layer under ``model.fit``. Its gradient is
    the sum of the members' gradients. All replicas must compute the same sums in the same order,
    including gradients, as they do if they run the same code. XLA compiles it on TPUs only.

    Args:
      tensor: a floating-point tensor with the same static shape in all members.
      groups: groups of all the strategy's replicas.
      name: the same name in all members. Sums of different names may run concurrently; those of
        one name run in order.

    Raises:
      UserError: if the strategy does not support it, or not in this place.
    """
    if groups.size == 1:
        return tensor
    strategy = tf.distribute.get_strategy()
    if compiles_all_reduces(strategy):
        return cross_replica_sum(tensor, groups)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        add = _sum_over_workers
    elif isinstance(strategy, tf.distribute.MirroredStrategy):
        add = _sum_over_devices
    else:
        raise UserError(
            f"{name}: {type(strategy).__name__} does not support sums over groups of replicas; "
            "use MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy"
        )

    @tf.custom_gradient
    def differentiable(local: tf.Tensor) -> tuple[tf.Tensor, object]:
        return add(local, groups, name), lambda gradient: group_sum(
            gradient, groups, f"{name}/gradient"
        )

    return differentiable(tensor)


def _sum_over_workers(tensor: tf.Tensor, groups: Groups, name: str) -> tf.Tensor:
    replica = this_replica()
    strategy = tf.distribute.get_strategy()
    hint = collective_hint(strategy)
    each = len(strategy.extended.worker_devices)
    if hint == "nccl" and straddles(groups, each):
        raise UserError(
            f"{name}: a worker of {each} GPUs would belong to several groups of {groups.size} "
            "replicas that span workers, whose NCCL communicators TensorFlow may create in "
            f"different orders and deadlock: choose a batch_norm_batch_size for a divisor or a "
            f"multiple of {each} replicas"
        )
    group = Communicator(groups.of(replica), replica, hint=hint)
    return group.all_reduce(tensor, f"group_sum/{name}")


def _sum_over_devices(tensor: tf.Tensor, groups: Groups, name: str) -> tf.Tensor:
    """Sums in the cross-replica context of a ``MirroredStrategy``, which has all tensors."""

    def add(
        strategy: tf.distribute.Strategy, values: tf.distribute.DistributedValues
    ) -> tf.distribute.DistributedValues:
        parts = strategy.experimental_local_results(values)
        sums = {}
        for members in groups.members:
            with tf.device(parts[members[0]].device):
                total = tf.add_n([parts[replica] for replica in members])
            sums.update(dict.fromkeys(members, total))
        return strategy.experimental_distribute_values_from_function(
            lambda context: sums[context.replica_id_in_sync_group]
        )

    try:
        return tf.distribute.get_replica_context().merge_call(add, args=(tensor,))
    except RuntimeError as error:
        raise UserError(
            f"{name}: sums over replicas of a MirroredStrategy do not work inside a tf.while_loop, "
            "a tf.cond or a nested tf.function; move it out, or use MultiWorkerMirroredStrategy"
        ) from error
