"""Collectives that send 16-bit numbers and add in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator


class HalfPrecisionCommunicator(Communicator):
    """A :class:`Communicator` for float32 tensors that sends half the bytes.

    Numbers are rounded when they are sent. Each part of a sum is added by one member, in float32,
    so results have two roundings instead of one per step of a ring, and the same bits in all
    members. Sums beyond the range of float16 (65504) become infinite.

    Args:
      *args: arguments of :class:`Communicator`.
      dtype: ``float16`` or ``bfloat16``.
      **kwargs: keyword arguments of :class:`Communicator`.
    """

    def __init__(self, *args: Any, dtype: tf.DType, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dtype = dtype

    def all_reduce(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """As :meth:`Communicator.all_reduce`, for [size * n]."""
        return self.all_gather(self.reduce_scatter(tensor, stream), stream)

    def exchange(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """As :meth:`Communicator.exchange`."""
        return self._send(super().exchange, tensor, stream)

    def all_gather(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """As :meth:`Communicator.all_gather`."""
        return self._send(super().all_gather, tensor, stream)

    def broadcast(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """As :meth:`Communicator.broadcast`."""
        return self._send(super().broadcast, tensor, stream)

    def _send(
        self, operation: Callable[[tf.Tensor, str], tf.Tensor], tensor: tf.Tensor, stream: str
    ) -> tf.Tensor:
        if self.size == 1:  # Nothing is sent.
            return operation(tensor, stream)
        return tf.cast(operation(tf.cast(tensor, self._dtype), stream), tensor.dtype)
