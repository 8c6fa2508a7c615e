"""The order in which TensorFlow ranks the members of a group."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import connect
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.workers import collective_hint


def in_rank_order(strategy: tf.distribute.Strategy, groups: Groups) -> Groups:
    """Returns the groups with their members in TensorFlow's rank order.

    TensorFlow ranks tasks by their names as text (worker 10 before worker 9), and the devices of a
    task by the links between them. Ranks determine who receives which part of an exchange, and the
    order of gathered parts. To find the order, each group gathers its replicas' ids.

    Args:
      strategy: the workers' strategy; all workers must call the function.
      groups: groups of its replicas.
    """
    pipelines = isinstance(strategy, PipelineStrategy)
    hint = "ring" if pipelines else collective_hint(strategy)
    if not pipelines:
        connect(strategy, groups.members, place=-1)

    def in_replica() -> tf.Tensor:
        replica = this_replica()
        # Pipelines communicate on the CPU.
        with tf.device("CPU:0") if pipelines else contextlib.nullcontext():
            # A place that gradient all-reduces do not have, because TensorFlow binds a group to its
            # first devices.
            communicator = Communicator(groups.of(replica), replica, place=-1, hint=hint)
            members = communicator.all_gather(tf.constant([replica], tf.float32), "ranks")
            return tf.distribute.get_replica_context().all_gather(members[tf.newaxis], axis=0)

    function = tf.function(lambda: strategy.run(in_replica), autograph=False)
    # A concrete function is not retraced in a strategy's scope.
    gathered = strategy.experimental_local_results(function.get_concrete_function()())[0].numpy()
    ranked = {tuple(members) for members in gathered.astype(int).tolist()}
    return Groups(tuple(sorted(ranked, key=min)))
