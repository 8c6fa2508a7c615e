"""Normalization of pixels by channel means and standard deviations, on the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError


@keras.saving.register_keras_serializable("imagenet_fast")
class PixelNormalization(keras.layers.Layer):
    """Subtracts each channel's mean and divides by its standard deviation.

    Input: uint8 or float [batch, height, width, channels] in 0..255. The arithmetic is float32 and
    the output has the layer's compute dtype, so mixed precision rounds each pixel once.

    Args:
      mean: of each channel, in 0..255.
      std: of each channel, positive.
      **kwargs: Keras' options (``name``, ``dtype``).

    Raises:
      UserError: if a standard deviation is not positive, or a channel has none.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], **kwargs: Any) -> None:
        # ``call`` casts after the arithmetic.
        super().__init__(autocast=False, **kwargs)
        self.mean = tuple(mean)
        self.std = tuple(std)
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise UserError(
                f"mean={list(self.mean)} and std={list(self.std)} must have an entry for each "
                "channel, and std only positive ones"
            )

    def build(self, input_shape: tf.TensorShape) -> None:
        """Checks the number of channels."""
        channels = input_shape[-1]
        if channels is not None and channels != len(self.mean):
            raise UserError(f"inputs have {channels} channels, but mean and std {len(self.mean)}")
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Normalizes a batch."""
        pixels = tf.cast(inputs, tf.float32)
        scale = tf.constant([1 / std for std in self.std], tf.float32)
        return tf.cast((pixels - tf.constant(self.mean, tf.float32)) * scale, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "mean": self.mean, "std": self.std}
