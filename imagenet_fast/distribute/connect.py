"""Making NCCL's communicators in one order, before training uses them at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.groups import Groups
from imagenet_fast.distribute.workers import collective_hint, worker_place

# A stream of its own for each connection: the keys of collectives differ.
_STREAMS = itertools.count()


def connect(
    strategy: tf.distribute.Strategy,
    groups: Iterable[Sequence[int]],
    *,
    place: int = 0,
    device: str = "",
    timeout_seconds: float = 0,
) -> None:
    """Makes the NCCL communicators of groups, one after another, where workers have GPUs.

    The first collective of a group makes its communicator, which waits for the group's GPUs on
    other hosts while it locks all collectives of its process
    (``NcclManager::GetCommunicator``, ``ncclCommInitRank``). If two groups reach over the same two
    hosts, as the columns of ``torus_2d`` do, each host may lock for another one: both then wait
    forever. Here all processes come to the groups in the same order.

    To be called by all workers, outside of replicas.

    Args:
      strategy: of the workers.
      groups: members of each, in an order that all workers share.
      place: as :class:`~imagenet_fast.distribute.collectives.Communicator` takes it.
      device: on which the groups meet; empty: the replica's own.
      timeout_seconds: after which a group gives up that others do not come; 0: never.
    """
    if collective_hint(strategy) != "nccl":
        return
    workers, own = worker_place(strategy)
    each = strategy.num_replicas_in_sync // workers
    here = set(range(own * each, (own + 1) * each))
    for group in groups:
        if here.intersection(group) and len(group) > 1:
            _meet_once(strategy, tuple(group), place, device, timeout_seconds)


def straddles(groups: Groups, each: int) -> bool:
    """Whether a process has members in several groups that reach over processes.

    Such groups must be connected before they are used at the same time.

    Args:
      groups: of all replicas.
      each: replicas of a process, which have consecutive numbers.
    """
    reaching = [
        {member // each for member in group}
        for group in groups.members
        if len({member // each for member in group}) > 1
    ]
    processes = [process for group in reaching for process in group]
    return len(processes) > len(set(processes))


def _meet_once(
    strategy: tf.distribute.Strategy,
    group: tuple[int, ...],
    place: int,
    device: str,
    timeout_seconds: float,
) -> None:
    stream = f"connect_{next(_STREAMS)}"

    def own() -> tf.Tensor:
        replica = this_replica()
        if replica not in group:
            return tf.zeros([1])
        with tf.device(device) if device else contextlib.nullcontext():
            meet = Communicator(
                group, replica, place=place, hint="nccl", timeout_seconds=timeout_seconds
            )
            return meet.all_reduce(tf.ones([1]), stream)

    function = tf.function(lambda: strategy.run(own), autograph=False)
    # A concrete function is not traced anew inside of a strategy's scope.
    for total in strategy.experimental_local_results(function.get_concrete_function()()):
        total.numpy()  # waits for it
