"""Prepares groups of replicas: NCCL communicators made in a fixed order, members in rank order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.workers import collective_hint, worker_place

# Numbers the streams of connections, so that their instance keys differ.
_STREAMS = itertools.count()


def connect(
    strategy: tf.distribute.Strategy,
    groups: Iterable[Sequence[int]],
    *,
    place: int = 0,
    device: str = "",
) -> None:
    """Creates the NCCL communicators of groups, one after another, if workers have GPUs.

    The first collective of a group creates its communicator: it locks all collectives of the
    process while it waits for the group's GPUs on other hosts (``NcclManager::GetCommunicator``,
    ``ncclCommInitRank``). If two groups span the same two hosts, as the columns of ``torus_2d`` do,
    the hosts may hold their locks for different groups and wait for each other forever. This
    function creates them in the same order in all processes.

    All workers must call it, outside of replicas.

    ``groups`` are in the same order in all workers, ``place`` is that of a ``Communicator``, and
    ``device`` the one that the groups use; empty: the replica's.
    """
    if collective_hint(strategy) != "nccl":
        return
    workers, worker = worker_place(strategy)
    each = strategy.num_replicas_in_sync // workers
    here = set(range(worker * each, (worker + 1) * each))
    for group in groups:
        if here.intersection(group) and len(group) > 1:
            _all_reduce_once(strategy, tuple(group), place, device)


def straddles(groups: Groups, each: int) -> bool:
    """Whether any process has members in several groups that span processes.

    Such groups must be connected before they are used concurrently.

    The ``each`` replicas of a process have consecutive ids.
    """
    processes = [{member // each for member in group} for group in groups.members]
    spanning = [process for group in processes if len(group) > 1 for process in group]
    return len(spanning) > len(set(spanning))


def in_rank_order(strategy: tf.distribute.Strategy, groups: Groups) -> Groups:
    """Returns the groups with their members in TensorFlow's rank order.

    TensorFlow ranks tasks by their names as text (worker 10 before worker 9), and the devices of a
    task by the links between them. Ranks determine who receives which part of an exchange, and the
    order of gathered parts. To find the order, each group gathers its replicas' ids.

    All workers must call it.
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

    gathered = _run_once(strategy, in_replica)[0]
    ranked = {tuple(members) for members in gathered.astype(int).tolist()}
    return Groups(tuple(sorted(ranked, key=min)))


def _all_reduce_once(
    strategy: tf.distribute.Strategy, group: tuple[int, ...], place: int, device: str
) -> None:
    stream = f"connect_{next(_STREAMS)}"

    def in_replica() -> tf.Tensor:
        replica = this_replica()
        if replica not in group:
            return tf.zeros([1])
        with tf.device(device) if device else contextlib.nullcontext():
            communicator = Communicator(group, replica, place=place, hint="nccl")
            return communicator.all_reduce(tf.ones([1]), stream)

    _run_once(strategy, in_replica)


def _run_once(
    strategy: tf.distribute.Strategy, in_replica: Callable[[], tf.Tensor]
) -> list[np.ndarray]:
    """Runs a function in all replicas; returns the results of this process', after waiting."""
    function = tf.function(lambda: strategy.run(in_replica), autograph=False)
    # A concrete function is not retraced in a strategy's scope.
    results = strategy.experimental_local_results(function.get_concrete_function()())
    return [result.numpy() for result in results]
