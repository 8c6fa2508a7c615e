"""Parameter counts and output shapes of blocks, without allocating their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.models.shape_only import shape_only


class BlockSize(NamedTuple):
    """The sizes of one block.

    Attributes:
        trainable: number of trainable parameters.
        outputs: the block's outputs, a structure of ``tf.TensorSpec`` with unknown batch size.
    """

    trainable: int
    outputs: Any


def block_sizes(
    blocks: Sequence[keras.layers.Layer], input_shape: tuple[int | None, ...]
) -> list[BlockSize]:
    """Returns the sizes of blocks in sequence.

    The blocks are not built. Each is copied by its configuration, one at a time, equal blocks with
    equal inputs once; of the copies' large weights, at most one takes memory at any time. Call it
    outside of a strategy's scope.

    Args:
        blocks: layers or models of one argument: a tensor or a structure of tensors.
        input_shape: of the first block's float32 input, without the batch dimension.
    """
    specs = tf.TensorSpec((None, *input_shape), tf.float32)
    size_of: dict[tuple[Any, ...], BlockSize] = {}
    sizes = []
    for block in blocks:
        kind = block_kind(block, specs)
        if kind not in size_of:
            size_of[kind] = _size(type(block), block.get_config(), specs)
        sizes.append(size_of[kind])
        specs = sizes[-1].outputs
    return sizes


def block_kind(block: keras.layers.Layer, inputs: Any) -> tuple[Any, ...]:
    """Returns a key that is equal for blocks with equal inputs that differ in weights and names."""
    config = block.get_config()
    names: dict[str, str] = {}
    _collect_names(config, names)
    return type(block), repr(_renamed(config, names)), repr(inputs)


def _collect_names(config: Any, names: dict[str, str]) -> None:
    """Numbers the names of a layer and its sublayers."""
    if isinstance(config, dict):
        if isinstance(config.get("name"), str):
            names.setdefault(config["name"], f"layer {len(names)}")
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            _collect_names(value, names)


def _renamed(config: Any, names: dict[str, str]) -> Any:
    if isinstance(config, dict):
        return {key: _renamed(value, names) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_renamed(value, names) for value in config)
    return names.get(config, config) if isinstance(config, str) else config


def _size(kind: type[keras.layers.Layer], config: dict[str, Any], specs: Any) -> BlockSize:
    inputs = tf.nest.map_structure(
        lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), specs
    )
    with shape_only():
        block = kind.from_config(config)
        outputs = block(inputs)
    return BlockSize(
        sum(math.prod(weight.shape) for weight in block.trainable_weights),
        tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), outputs),
    )
