"""A sum over a group of replicas, through which gradients flow, under any strategy."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import straddles
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.tpu import compiles_all_reduces, cross_replica_sum
from imagenet_fast.distribute.workers import collective_hint


def group_sum(tensor: tf.Tensor, groups: Groups, name: str) -> tf.Tensor:
    """Returns the sum of the tensors of a group's replicas, the same in all of them.

    To be called in replica context: inside ``strategy.run`` or a layer under ``model.fit``. Its
    gradient is the sum of the members' gradients. All replicas must come to the same sums in the
    same order, gradients included, as they do when they run the same code. XLA compiles it on TPUs
    only.

    Args:
      tensor: a floating dtype; the same shape, known before the program runs, in all members.
      groups: of all the strategy's replicas.
      name: the same in all members. Sums of different names can be under way at the same time;
        those of one name are done in their order.

    Raises:
      UserError: if the strategy has no such sums, or none where this one is called.
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
            f"{name}: {type(strategy).__name__} has no sums over groups of replicas; "
            "use MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy"
        )

    @tf.custom_gradient
    def differentiable(own: tf.Tensor) -> tuple[tf.Tensor, object]:
        return add(own, groups, name), lambda gradient: group_sum(
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
            f"{name}: groups of {groups.size} replicas reach over workers of {each} GPUs each in "
            "several ways, for which TensorFlow may make NCCL's communicators in different orders "
            f"and wait forever: take a divisor or a multiple of {each} replicas "
            "(batch_norm_batch_size)"
        )
    group = Communicator(groups.of(replica), replica, hint=hint)
    return group.all_reduce(tensor, f"group_sum/{name}")


def _sum_over_devices(tensor: tf.Tensor, groups: Groups, name: str) -> tf.Tensor:
    """The replicas of a ``MirroredStrategy`` meet in one thread, which sees all their tensors."""

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
            f"{name}: the replicas of a MirroredStrategy cannot be summed inside a tf.while_loop, "
            "a tf.cond or a tf.function of their own; take it out, or use "
            "MultiWorkerMirroredStrategy"
        ) from error
