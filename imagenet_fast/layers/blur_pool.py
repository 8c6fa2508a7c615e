"""A fixed blur before subsampling."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError

# The binomial filter of 3 x 3. Its values are exact in 16-bit types, too.
_FILTER = np.outer([1, 2, 1], [1, 2, 1]) / 16


@keras.saving.register_keras_serializable("imagenet_fast")
class BlurPool(keras.layers.Layer):
    """Blurs each channel with the 3x3 binomial filter, and subsamples.

    The "triangle" filter of Zhang 2019, "Making Convolutional Networks Shift-Invariant Again". The
    image is padded with zeros, as in ffcv-imagenet and composer; Zhang's code reflects it.

    Input: [batch, height, width, channels]. Output: [batch, ceil(height / strides),
    ceil(width / strides), channels], in the compute dtype. The layer has no weights.

    Args:
      strides: of the subsampling, in both directions.
      **kwargs: Keras' options (``name``, ``dtype``).

    Raises:
      UserError: if ``strides`` is not positive.
    """

    def __init__(self, strides: int = 1, **kwargs: Any) -> None:
        if strides < 1:
            raise UserError(f"strides is {strides}, but must be positive")
        super().__init__(**kwargs)
        self.strides = strides

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Blurs a batch."""
        kernel = np.tile(_FILTER[:, :, np.newaxis, np.newaxis], [1, 1, inputs.shape[-1], 1])
        return tf.nn.depthwise_conv2d(
            inputs,
            tf.constant(kernel, inputs.dtype),
            [1, self.strides, self.strides, 1],
            # "SAME" would pad images of even size only at the bottom and right, with strides.
            [[0, 0], [1, 1], [1, 1], [0, 0]],
        )

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "strides": self.strides}
