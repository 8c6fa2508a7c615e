"""Keras blocks that keep an emulated device busy for a given time."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops

_SOURCE = pathlib.Path(__file__).with_suffix(".cc")
# Common layers compute two gradients: of the inputs and of the weights.
BACKWARD = 2.0


def check_emulation() -> None:
    """Checks that the op of emulated devices can be loaded.

    Raises:
      UserError: if it can be neither found nor compiled.
    """
    try:
        load_ops(_SOURCE)
    except OSError as error:
        raise UserError(f"devices cannot be emulated: {error}") from error


class EmulatedBlock(keras.layers.Layer):
    """Multiplies its inputs by a scalar weight, and keeps its device busy for a given time.

    Args:
      device: its number, in [0, 64). Blocks of one device wait for each other.
      seconds: of the forward pass for one example; the backward pass takes :data:`BACKWARD` times
        this.
      name: of the layer.
    """

    def __init__(self, device: int, seconds: float, name: str | None = None) -> None:
        super().__init__(name=name)
        self._device = device
        self._seconds = seconds

    def build(self, input_shape: Any) -> None:
        """Makes the weight, a scalar 1."""
        self._weight = self.add_weight(name="weight", shape=[], initializer="ones")
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps float32 [examples, ...] to the same shape."""

        @tf.custom_gradient
        def product(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, Any]:
            outputs = self._work(values * weight, 1.0)

            def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                upstream = self._work(upstream, BACKWARD)
                # It uses the outputs, so that they are recomputed unless they were kept.
                return upstream * weight, tf.reduce_sum(upstream * outputs) / weight

            return outputs, gradients

        return product(inputs, tf.convert_to_tensor(self._weight))

    def _work(self, values: tf.Tensor, times: float) -> tf.Tensor:
        examples = tf.cast(tf.shape(values)[0], tf.float32)
        microseconds = tf.cast(1e6 * times * self._seconds * examples, tf.int64)
        return load_ops(_SOURCE).imagenet_fast_emulated_work(
            values=values, microseconds=microseconds, device=self._device
        )
