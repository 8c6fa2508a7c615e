"""Collectives whose numbers travel in 16 bits and are summed in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from imagenet_fast.distribute.collectives import Communicator


class HalfPrecisionCommunicator(Communicator):
    """Half the bytes of :class:`Communicator`, for float32 tensors.

    A number is rounded when it is sent. A sum is made by one member, in float32 and from what all
    have sent, so that it suffers two roundings and not one at each of a ring's steps; all members
    get the same bits. A sum that float16 cannot hold, above 65504, becomes infinite.

    Args:
      *args: as :class:`Communicator` takes them.
      dtype: ``float16`` or ``bfloat16``.
      **kwargs: as :class:`Communicator` takes them.
    """

    def __init__(self, *args: Any, dtype: tf.DType, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dtype = dtype

    def all_reduce(self, tensor: tf.Tensor, stream: str) -> tf.Tensor:
        """As :meth:`Communicator.all_reduce`, of [size * n]."""
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
        if self.size == 1:  # Nothing travels.
            return operation(tensor, stream)
        return tf.cast(operation(tf.cast(tensor, self._dtype), stream), tensor.dtype)
