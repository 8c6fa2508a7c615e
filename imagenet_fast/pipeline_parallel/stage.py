"""A stage of a pipeline: some blocks that follow each other, on a device of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.pipeline_parallel.statistics import batch_norms


class Stage:
    """Blocks on a device.

    Args:
      blocks: that follow each other.
      device: on which they are computed.

    Attributes:
      blocks: the same.
      device: the same.
    """

    def __init__(self, blocks: Sequence[keras.layers.Layer], device: str) -> None:
        self.blocks = list(blocks)
        self.device = device
        # Of what several blocks share, it knows once.
        self._all = keras.layers.Layer()
        self._all.blocks = self.blocks

    @property
    def variables(self) -> list[tf.Variable]:
        """What is trained."""
        return self._all.trainable_variables

    @property
    def norms(self) -> list[keras.layers.BatchNormalization]:
        """The batch norms in the blocks."""
        return batch_norms(self.blocks)

    @property
    def losses(self) -> list[tf.Tensor]:
        """What the blocks' regularization adds to the loss, in the call that was made last."""
        return self._all.losses

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of the last block; to be called in the device's scope."""
        for block in self.blocks:
            # Keras tells the layers inside a block, too, if its own call has no such argument.
            inputs = block(inputs, training=training)
        return inputs
