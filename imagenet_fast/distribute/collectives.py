"""Collectives (all-reduce, all-to-all, all-gather, broadcast) in groups of replicas.

TensorFlow's strategies all-reduce over all replicas only. Here the same operations
(``CollectiveReduceV2`` and others) work in any group. Their keys are fixed: one round trip to the
chief fewer per use.

They work in the replica context of a ``MultiWorkerMirroredStrategy`` or a ``PipelineStrategy``,
inside a ``tf.function``. All members of a group must execute the same operations. The operations
have no gradients.

Order: over gRPC (``hint="ring"``), members may execute the operations of different streams in
different orders. NCCL matches the operations of a communicator by launch order, and TensorFlow
launches those of all communicators of a GPU on one CUDA stream (``NcclManager::GetCommunicator``),
where one that waits for another GPU blocks all that follow. With ``hint="nccl"``, all operations of
a GPU therefore name one ordering token, that of the strategy's own all-reduce: automatic control
dependencies then run them one after another, in program order. This cannot deadlock if there is one
order of all operations with which each member's program agrees, and if the communicators exist
(:mod:`imagenet_fast.distribute.connect`).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

import tensorflow as tf

from imagenet_fast.distribute.groups import group_key

# Ordering tokens by what they order. They live as long as the process, because graphs refer to
# them.
_TOKENS: dict[tuple[Hashable, ...], tf.Tensor] = {}
# The operation of each instance key, to detect collisions.
_INSTANCES: dict[int, str] = {}


def this_replica() -> int:
    """Returns the id of the replica whose program is being traced, in replica context."""
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    if replica is None:
        raise RuntimeError("the replica id is not a constant")
    return int(replica)


class Communicator:
    """Executes collectives of a group for one of its replicas.

    Args:
      members: the replicas of the group. The first is the source of broadcasts. Exchanged and
        gathered parts are in TensorFlow's rank order
        (:func:`~imagenet_fast.distribute.connect.in_rank_order`).
      replica: the id of this replica.
      place: the index of the device, if the same replicas form groups on several devices.
      hint: ``"auto"``, ``"ring"`` or ``"nccl"``.
      timeout_seconds: time limit of an operation that some members do not join; 0: none.
      half: a 16-bit dtype to which float32 tensors are rounded when they are sent. Each part of a
        sum, of [size * n], is added by one member, in float32, so results have two roundings
        instead of one per step of a ring, and the same bits in all members. Sums beyond the range
        of float16 (65504) become infinite. None: tensors are sent as they are.
    """

    def __init__(
        self,
        members: Sequence[int],
        replica: int,
        *,
        place: int = 0,
        hint: str = "auto",
        timeout_seconds: float = 0,
        half: tf.DType | None = None,
    ) -> None:
        self.members = tuple(members)
        self.position = self.members.index(replica)
        self._replica, self._place = replica, place
        self._hint = hint
        self._timeout = float(timeout_seconds)
        self._half = half
        self._key = group_key(self.members, place)

    @property
    def size(self) -> int:
        """The number of replicas in the group."""
        return len(self.members)

    def all_reduce(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns the sum of the members' tensors.

        Args:
          tensor: a tensor with the same shape and dtype in all members.
          stream: operations of one stream run in order, those of different streams concurrently.
            Each use in a program needs another stream or another shape.
        """
        if self.size == 1:
            return tensor
        if self._half is not None:
            return self.all_gather(self.reduce_scatter(tensor, stream), stream)
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
          tensor: [size * n], with the same n in all members.
          stream: as in :meth:`all_reduce`.

        Returns:
          [size, n]: a row from each member, in rank order.
        """
        sent = self._rounded(tensor)
        parts = tf.reshape(sent, [self.size, -1])
        if self.size == 1:
            return parts
        exchanged = tf.raw_ops.CollectiveAllToAllV2(
            input=_as_supported(parts),
            ordering_token=self._token(sent, stream),
            **self._keys("exchange", sent, stream),
        )
        exchanged.set_shape(parts.shape)
        return tf.cast(tf.bitcast(exchanged, sent.dtype), tensor.dtype)

    def reduce_scatter(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns this member's part of the sum.

        An exchange and a local sum, because ``CollectiveReduceScatterV2`` has no CPU kernel.

        Args:
          tensor: [size * n], with the same n in all members.
          stream: as in :meth:`all_reduce`.

        Returns:
          [n]: parts are assigned in rank order.
        """
        return tf.reduce_sum(self.exchange(tensor, stream), axis=0)

    def all_gather(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns [size * n] from all members' [n], in rank order."""
        if self.size == 1:
            return tensor
        sent = self._rounded(tensor)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=_as_supported(sent),
            ordering_token=self._token(sent, stream),
            **self._keys("all_gather", sent, stream),
        )
        gathered.set_shape([self.size * tensor.shape[0]])
        return tf.cast(tf.bitcast(gathered, sent.dtype), tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """Returns the first member's tensor; those of the others have the same shape and dtype.

        Not for NCCL, because TensorFlow's operation takes no ordering token.
        """
        if self.size == 1:
            return tensor
        if self._hint == "nccl":
            raise RuntimeError("broadcasts cannot be ordered among other NCCL collectives")
        sent = self._rounded(tensor)
        keys = self._keys("broadcast", sent, stream)
        bits = _as_supported(sent)
        if self.position == 0:
            received = tf.raw_ops.CollectiveBcastSendV2(input=bits, **keys)
        else:
            # After the computation of this member's value, on which the first member's may depend.
            with tf.control_dependencies([sent]):
                shape = tf.constant(tensor.shape.as_list(), tf.int32)
                received = tf.raw_ops.CollectiveBcastRecvV2(T=bits.dtype, shape=shape, **keys)
            received.set_shape(tensor.shape)
        return tf.cast(tf.bitcast(received, sent.dtype), tensor.dtype)

    def _rounded(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what of a tensor is sent, if there are other members."""
        return tensor if self._half is None or self.size == 1 else tf.cast(tensor, self._half)

    def _keys(self, kind: str, tensor: tf.Tensor, stream: str) -> dict[str, object]:
        size = tensor.shape.num_elements()
        if size is None:
            raise ValueError(f"{kind} in {stream}: the shape {tensor.shape} must be static")
        operation = f"{self._key} {kind} {stream} {tensor.dtype.name} {size}"
        instance = 2**30 + zlib.crc32(operation.encode()) % 2**30
        if _INSTANCES.setdefault(instance, operation) != operation:
            raise RuntimeError(
                f"two collectives have the same key: {operation!r} and {_INSTANCES[instance]!r}; "
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
        """Returns the ordering token: operations that name the same one run one after another.

        Without a token, TensorFlow would keep the order of all collectives of a program.
        """
        if self._hint == "nccl":
            return [_launch_token(self._replica, self._place, tensor.device)]
        # With the replica, because tensors in nested tf.functions may have no device.
        return [_make_token((self._key, self._replica, stream, tensor.device), tensor.device)]


def _launch_token(replica: int, place: int, device: str) -> tf.Tensor:
    """Returns the token that orders all NCCL collectives of one GPU.

    It is that of the strategy's launcher for the replica's device (``CollectiveReplicaLauncher`` in
    ``tensorflow/python/distribute/cross_device_utils.py``), because a training step also contains
    the strategy's collectives, such as that of the loss that Keras returns. A pipeline does not use
    those; there each stage has its own token.
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        launchers = strategy.extended._cross_device_ops._launchers
        return launchers[replica % len(launchers)]._get_ordering_token()
    return _make_token(("nccl", replica, place), device)


def _make_token(key: tuple[Hashable, ...], device: str) -> tf.Tensor:
    """Returns the token with this key, after creating it if necessary."""
    if key not in _TOKENS:
        with tf.init_scope(), tf.device(device):
            # A handle without a variable: only its name matters.
            _TOKENS[key] = tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name=f"collectives_{key}"
            )
    return _TOKENS[key]


def _as_supported(tensor: tf.Tensor) -> tf.Tensor:
    """Returns bfloat16 bits as float16, because TensorFlow cannot gather or broadcast bfloat16."""
    return tf.bitcast(tensor, tf.float16) if tensor.dtype == tf.bfloat16 else tensor
