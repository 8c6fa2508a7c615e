"""Sums and exchanges among some of the replicas, worker processes included.

TensorFlow's own strategies sum over all replicas only. These are the operations beneath them
(``CollectiveReduceV2`` and others) on any group, with keys that are known before the program runs,
which saves a round trip to the leader for each use.

To be used in the replica context of a ``MultiWorkerMirroredStrategy`` or a ``PipelineStrategy``,
inside a ``tf.function``. Every member of a group must come to the same operations. None of the
operations has a gradient.

Order: over gRPC (``hint="ring"``), operations of different streams need not come in the same order
in all members. NCCL matches the operations of a communicator by the order of their launches, and
TensorFlow launches those of all communicators of a GPU on one CUDA stream
(``NcclManager::GetCommunicator``), where one that waits for another GPU holds up all behind it.
With ``hint="nccl"`` all operations of a GPU therefore name one ordering token, that of the
strategy's own all-reduce: automatic control dependencies then run them one after another, in the
program's order. That cannot deadlock if the members' programs agree on one order of all
operations, of which each member takes part in some, and if communicators have been made before
(:mod:`imagenet_fast.distribute.connect`).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

import tensorflow as tf

from imagenet_fast.distribute.groups import group_key

# The ordering tokens by what they order. They live as long as the process, since graphs refer to
# them.
_TOKENS: dict[tuple[Hashable, ...], tf.Tensor] = {}
# By instance key: what it stands for, to see two that are the same by accident.
_INSTANCES: dict[int, str] = {}


def this_replica() -> int:
    """Returns the number of the replica whose part of a program is being made.

    To be called in replica context.
    """
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    if replica is None:
        raise RuntimeError("the replica's number is not known before the program runs")
    return int(replica)


class Communicator:
    """One replica's end of a group.

    Args:
      members: the replicas of the group. The first one of these is who broadcasts. What is
        exchanged and gathered has the order in which TensorFlow ranks them, which
        :func:`~imagenet_fast.distribute.ranks.in_rank_order` tells.
      replica: this one.
      place: number of the device, of several on which the same replicas meet.
      hint: ``"auto"``, ``"ring"`` or ``"nccl"``.
      timeout_seconds: after which an operation gives up that others do not come to; 0: never.
    """

    def __init__(
        self,
        members: Sequence[int],
        replica: int,
        *,
        place: int = 0,
        hint: str = "auto",
        timeout_seconds: float = 0,
    ) -> None:
        self.members = tuple(members)
        self.position = self.members.index(replica)
        self._replica, self._place = replica, place
        self._hint = hint
        self._timeout = float(timeout_seconds)
        self._key = group_key(self.members, place)

    @property
    def size(self) -> int:
        """Replicas in the group."""
        return len(self.members)

    def all_reduce(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns the sum of the members' tensors.

        Args:
          tensor: the same shape and dtype in all of them.
          stream: operations of one stream are done in their order; those of different streams, at
            the same time. Each use in a program has a stream of its own, or another shape.
        """
        if self.size == 1:
            return tensor
        total = tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            merge_op="Add",
            final_op="Id",
            ordering_token=self._token(tensor, stream),
            **self._keys("all_reduce", tensor, stream),
        )
        total.set_shape(tensor.shape)
        return total

    def exchange(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns this member's part of each member's tensor (an all-to-all).

        Args:
          tensor: [size * n], the same in all members.
          stream: as in :meth:`all_reduce`.

        Returns:
          [size, n]: the row of the first rank is the first.
        """
        parts = tf.reshape(tensor, [self.size, -1])
        if self.size == 1:
            return parts
        exchanged = tf.raw_ops.CollectiveAllToAllV2(
            input=_movable(parts),
            ordering_token=self._token(tensor, stream),
            **self._keys("exchange", tensor, stream),
        )
        exchanged.set_shape(parts.shape)
        return tf.bitcast(exchanged, tensor.dtype)

    def reduce_scatter(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns this member's part of the sum.

        An exchange and a local sum: TensorFlow has no such operation for CPUs.

        Args:
          tensor: [size * n], the same in all members.
          stream: as in :meth:`all_reduce`.

        Returns:
          [n]: the first rank's part comes first.
        """
        return tf.reduce_sum(self.exchange(tensor, stream), axis=0)

    def all_gather(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns [size * n] from all members' [n], the first rank's first."""
        if self.size == 1:
            return tensor
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=_movable(tensor),
            ordering_token=self._token(tensor, stream),
            **self._keys("all_gather", tensor, stream),
        )
        gathered.set_shape([self.size * tensor.shape[0]])
        return tf.bitcast(gathered, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns the first member's tensor; the others' give its shape and dtype.

        Not for NCCL: TensorFlow's operation takes no ordering token.
        """
        if self.size == 1:
            return tensor
        if self._hint == "nccl":
            raise RuntimeError("broadcasts cannot be ordered among other NCCL collectives")
        keys = self._keys("broadcast", tensor, stream)
        moved = _movable(tensor)
        if self.position == 0:
            sent = tf.raw_ops.CollectiveBcastSendV2(input=moved, **keys)
            return tf.bitcast(sent, tensor.dtype)
        # Not before what led to this member's own value, which the first one's depends on.
        with tf.control_dependencies([tensor]):
            shape = tf.constant(tensor.shape.as_list(), tf.int32)
            received = tf.raw_ops.CollectiveBcastRecvV2(T=moved.dtype, shape=shape, **keys)
        received.set_shape(tensor.shape)
        return tf.bitcast(received, tensor.dtype)

    def _keys(self, kind: str, tensor: tf.Tensor, stream: str) -> dict[str, object]:
        size = tensor.shape.num_elements()
        if size is None:
            raise ValueError(f"{kind} in {stream}: the shape {tensor.shape} must be known")
        told = f"{self._key} {kind} {stream} {tensor.dtype.name} {size}"
        instance = 2**30 + zlib.crc32(told.encode()) % 2**30
        if _INSTANCES.setdefault(instance, told) != told:
            raise RuntimeError(
                f"two collectives have the same key: {told!r} and {_INSTANCES[instance]!r}; "
                "rename one of the streams"
            )
        return {
            "group_size": tf.constant(self.size, tf.int32),
            "group_key": tf.constant(self._key, tf.int32),
            "instance_key": tf.constant(instance, tf.int32),
            "communication_hint": self._hint,
            "timeout_seconds": self._timeout,
        }

    def _token(self, tensor: tf.Tensor, stream: str) -> list[tf.Tensor]:
        """The resource that orders this operation: all that name it run one after another.

        Without one, TensorFlow would keep the order of all collectives of a program.
        """
        if self._hint == "nccl":
            return [_launch_token(self._replica, self._place, tensor.device)]
        # A tensor in a tf.function of its own knows no device, so that this alone does not tell
        # replicas of one process apart.
        return [_own_token((self._key, self._replica, stream, tensor.device), tensor.device)]


def _launch_token(replica: int, place: int, device: str) -> tf.Tensor:
    """Returns the token that orders all NCCL collectives of one GPU.

    The strategy has collectives of its own in a training step, such as that of the loss that Keras
    returns, and orders them by the token of its launcher for the replica's device
    (``CollectiveReplicaLauncher`` in ``tensorflow/python/distribute/cross_device_utils.py``). A
    pipeline does not use the strategy's; there the operations of a stage have a token of their own.
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        launchers = strategy.extended._cross_device_ops._launchers
        return launchers[replica % len(launchers)]._get_ordering_token()
    return _own_token(("nccl", replica, place), device)


def _own_token(place: tuple[Hashable, ...], device: str) -> tf.Tensor:
    """Returns the token of a place, which is made the first time."""
    if place not in _TOKENS:
        with tf.init_scope(), tf.device(device):
            # Only its name matters: nothing is ever stored under it.
            _TOKENS[place] = tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name=f"collectives_{place}"
            )
    return _TOKENS[place]


def _movable(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the same bits as a type that TensorFlow gathers and broadcasts: not bfloat16."""
    return tf.bitcast(tensor, tf.float16) if tensor.dtype == tf.bfloat16 else tensor
