"""A stage of a pipeline: consecutive blocks on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.statistics import batch_norms


class WithMasks(NamedTuple):
    """What one stage sends to the next.

    Attributes:
      values: the outputs, in any structure.
      masks: their Keras masks, by the position of the output in the flattened structure.
    """

    values: Any
    masks: dict[int, tf.Tensor]


class Stage:
    """Consecutive blocks on one device.

    Args:
      blocks: Keras layers.
      device: that computes them.

    Attributes:
      blocks: as given.
      device: as given.
    """

    def __init__(self, blocks: Sequence[keras.layers.Layer], device: str) -> None:
        self.blocks = list(blocks)
        self.device = device
        # A layer that several blocks share counts once in it.
        self._container = keras.layers.Layer()
        self._container.blocks = self.blocks
        self._losses_of_call: list[tf.Tensor] = []

    @property
    def variables(self) -> list[tf.Variable]:
        """The trainable variables."""
        return self._container.trainable_variables

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The blocks and all layers inside them."""
        return [layer for block in self.blocks for layer in (block, *block.submodules)]

    @property
    def norms(self) -> list[keras.layers.BatchNormalization]:
        """The batch-norm layers in the blocks."""
        return batch_norms(self.blocks)

    @property
    def losses(self) -> list[tf.Tensor]:
        """Regularization and ``add_loss`` of the most recent call."""
        regularizers = [
            regularizer
            for layer in self._container._flatten_layers()
            for regularizer in layer._callable_losses
        ]
        values = [*self._losses_of_call, *(regularizer() for regularizer in regularizers)]
        return [value for value in values if value is not None]

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of the last block; to be called in the device's scope.

        Raises:
          UserError: if they are not tensors.
        """
        losses: dict[int, tf.Tensor] = {}
        for block in self.blocks:
            # Keras also passes it to the layers inside a block whose call has no such argument.
            inputs = block(inputs, training=training)
            # Now, because the next call of the same layer deletes them.
            for layer in block._flatten_layers():
                for loss in layer._eager_losses or layer._losses:
                    losses[id(loss)] = loss
        self._losses_of_call = list(losses.values())
        for value in tf.nest.flatten(inputs):
            if not tf.is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
                raise UserError(
                    f"block {self.blocks[-1].name!r} returns a value of type "
                    f"{type(value).__name__}, but stages pass on only tensors, neither ragged nor "
                    "sparse, in any structure"
                )
        return inputs


def with_masks(outputs: Any) -> WithMasks:
    """Returns tensors, or their specs, with the masks that Keras has attached to them."""
    if isinstance(outputs, WithMasks):
        return outputs
    masks = {
        place: output._keras_mask
        for place, output in enumerate(tf.nest.flatten(outputs))
        if getattr(output, "_keras_mask", None) is not None
    }
    return WithMasks(outputs, masks)


def masked(outputs: WithMasks) -> Any:
    """Returns the tensors, with the masks attached for Keras."""
    flat = tf.nest.flatten(outputs.values)
    for place, mask in outputs.masks.items():
        flat[place] = tf.identity(flat[place])
        flat[place]._keras_mask = mask
    return tf.nest.pack_sequence_as(outputs.values, flat)
