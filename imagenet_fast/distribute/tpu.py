"""Sums over replicas in programs that XLA compiles, as for TPUs."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.virtual import VirtualStrategy, VirtualTPUStrategy, xla_sum


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas are TPU cores, or virtual ones."""
    return isinstance(strategy, (tf.distribute.TPUStrategy, VirtualTPUStrategy))


def compiles_all_reduces(strategy: tf.distribute.Strategy) -> bool:
    """Whether XLA compiles the replicas' program together with its all-reduces."""
    return isinstance(strategy, (tf.distribute.TPUStrategy, VirtualStrategy))


def cross_replica_sum(tensor: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Returns the differentiable sum over the group of a tensor of one shape and dtype in all.

    For replica context, under a strategy for which :func:`compiles_all_reduces` holds.
    """
    if isinstance(tf.distribute.get_strategy(), VirtualStrategy):
        return xla_sum(tensor, groups)
    return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=groups.members)
