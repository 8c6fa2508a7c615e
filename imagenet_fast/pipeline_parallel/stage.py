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

    Attributes:
      blocks: Keras layers.
      device: that computes them.
    """

    def __init__(self, blocks: Sequence[keras.layers.Layer], device: str) -> None:
        self.blocks = list(blocks)
        self.device = device
        self._losses_of_call: list[tf.Tensor] = []

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables, each once."""
        found = [own for block in self.blocks for own in block.trainable_variables]
        return list({id(own): own for own in found}.values())

    @property
    def norms(self) -> list[keras.layers.BatchNormalization]:
        """The batch-norm layers in the blocks."""
        return batch_norms(self.blocks)

    @property
    def losses(self) -> list[tf.Tensor]:
        """Regularization and ``add_loss`` of the most recent call."""
        return [
            *self._losses_of_call,
            *(own.regularizer(own) for own in _regularized(self.variables)),
        ]

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of the last block; to be called in the device's scope.

        Raises:
          UserError: if they are not tensors.
        """
        losses: dict[int, tf.Tensor] = {}
        for block in self.blocks:
            # Keras also passes it to the layers inside a block whose call has no such argument.
            inputs = block(inputs, training=training)
            # Now, because the next call of the same layer deletes them. Regularization comes last.
            found = block.losses
            count = len(found) - len(_regularized(block.trainable_variables))
            losses.update((id(loss), loss) for loss in found[:count])
        self._losses_of_call = list(losses.values())
        for value in tf.nest.flatten(inputs):
            if not tf.is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
                raise UserError(
                    f"block {self.blocks[-1].name!r} returns a value of type "
                    f"{type(value).__name__}, but stages pass on only tensors, neither ragged nor "
                    "sparse, in any structure"
                )
        return inputs


def _regularized(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return [variable for variable in variables if variable.regularizer is not None]


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
