"""Sums over replicas that are part of the program that XLA compiles for all of them."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.virtual import VirtualStrategy, VirtualTPUStrategy, xla_sum


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas are a TPU's cores, or stand for them."""
    return isinstance(strategy, (tf.distribute.TPUStrategy, VirtualTPUStrategy))


def compiles_all_reduces(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA compiles what the replicas run, together with the sums over them."""
    return isinstance(strategy, (tf.distribute.TPUStrategy, VirtualStrategy))


def cross_replica_sum(tensor: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Returns the sum of the tensors of a group's replicas, through which gradients flow.

    To be called in replica context, under a strategy for which :func:`compiles_all_reduces` holds.

    Args:
      tensor: of the same shape and dtype in all replicas.
      groups: of all the strategy's replicas.
    """
    if isinstance(tf.distribute.get_strategy(), VirtualStrategy):
        return xla_sum(tensor, groups)
    return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=groups.members)
