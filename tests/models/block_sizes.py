"""Parameter counts and output specs of blocks in sequence, without memory for their weights."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.models.shape_only import shape_only


class BlockSize(NamedTuple):
    """Of a block: its trainable parameters, and the specs of its outputs for any batch size."""

    trainable: int
    outputs: Any


def block_sizes(blocks, input_shape):
    """The sizes of blocks for images of a shape; each block is a copy, made and freed in turn."""
    specs, sizes = tf.TensorSpec((None, *input_shape), tf.float32), []
    for block in blocks:
        inputs = tf.nest.map_structure(
            lambda own: keras.Input(own.shape[1:], dtype=own.dtype), specs
        )
        with shape_only():
            copy = type(block).from_config(block.get_config())
            specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), copy(inputs))
        trainable = sum(math.prod(weight.shape) for weight in copy.trainable_weights)
        sizes.append(BlockSize(trainable, specs))
    return sizes
