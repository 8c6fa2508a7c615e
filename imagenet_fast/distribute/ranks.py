"""In which order TensorFlow ranks the members of a group."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import connect
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.workers import collective_hint


def in_rank_order(strategy: tf.distribute.Strategy, groups: Groups) -> Groups:
    """Returns the groups, the members of each in the order in which TensorFlow ranks them.

    It ranks tasks by their names as texts, worker 10 before worker 9, and the devices of a task by
    the links between them. Of an exchange, the first rank gets the first parts; of what is
    gathered, its part is the first. So the order is asked for: each group gathers its numbers.

    Args:
      strategy: of the workers, all of which must come here.
      groups: of its replicas.
    """
    pipelines = isinstance(strategy, PipelineStrategy)
    hint = "ring" if pipelines else collective_hint(strategy)
    if not pipelines:
        connect(strategy, groups.members, place=-1)

    def own() -> tf.Tensor:
        replica = this_replica()
        with tf.device("CPU:0") if pipelines else contextlib.nullcontext():  # where those meet
            # TensorFlow binds a group to the devices that meet in it first: the place is one that
            # gradient all-reduces do not have.
            meet = Communicator(groups.of(replica), replica, place=-1, hint=hint)
            members = meet.all_gather(tf.constant([replica], tf.float32), "ranks")
            return tf.distribute.get_replica_context().all_gather(members[tf.newaxis], axis=0)

    function = tf.function(lambda: strategy.run(own), autograph=False)
    # A concrete function is not traced anew inside of a strategy's scope.
    gathered = strategy.experimental_local_results(function.get_concrete_function()())[0].numpy()
    found = {tuple(members) for members in gathered.astype(int).tolist()}
    return Groups(tuple(sorted(found, key=min)))
