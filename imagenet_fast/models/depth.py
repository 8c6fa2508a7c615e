"""The depth of a network's layers by its blocks, for freezing and layer-wise learning rates."""

from __future__ import annotations

import re
from collections.abc import Iterator

import keras

from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.graph import computes_its_graph, is_functional

# What libraries call the layers of one block: stage1_block2_conv1 and conv2_block1_1_bn,
# block2a_dwconv, convnext_tiny_stage_0_block_0_layernorm, expanded_conv_3_expand, conv_pw_5;
# AmoebaNet's stem2_input1 and stage2_reduction_input1; of NASNet, what ends in _stem_1, _reduce_4
# or, in normal cells, _7.
_BLOCK = re.compile(
    r"(.*?(?:stage_?\d+_)?(?:block|cell)_?\d+[a-z]?)(?:_|$)"
    r"|(expanded_conv(?:_\d+)?)_|conv_[dp]w_(\d+)|(stem\d+|stage\d+_reduction)(?:_(?!conv)|$)"
    r"|(?:adjust|reduction|normal|separable)_.*?_((?:stem_|reduce_)?\d+)$"
)
Block = list[keras.layers.Layer]


def blocks_of(network: keras.Model) -> list[Block]:
    """Returns the layers with weights of each block of a built network, from input to logits.

    A block is what names of layers say (``block2a`` of EfficientNet, ``stage1_block2``) or, where
    they do not, what is between two places where a network has a single tensor, such as the
    branches of Inception, or one of several equal layers in a layer, such as the blocks of a
    transformer. What has vectors only, such as batch norm, belongs to the block before it, and to
    the one after it at the beginning. The classification head is a block of its own.
    """
    blocks: dict[str, Block] = {}
    last, waiting = "", Block()
    for key, layer in _keyed(network):
        if key not in blocks and not _has_kernel(layer):
            if last:
                blocks[last].append(layer)
            else:
                waiting.append(layer)
            continue
        blocks[key] = [*waiting, *blocks.get(key, []), layer]
        last, waiting = key, Block()
    if waiting:
        blocks[last] = waiting
    return [*blocks.values()]


def name_of_block(block: Block) -> str:
    """Returns the name of a block for people: what its layers' names begin with, or a layer's."""
    layers = [layer for layer in block if _has_kernel(layer)] or block
    key = next(filter(None, map(_key, layers)), layers[0].name)
    # Of MobileNet and NASNet, keys are what names end in.
    return key if any(layer.name.startswith(key) for layer in layers) else layers[-1].name


def _keyed(model: keras.Model) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields each layer with weights, and what is the same for the layers of its block."""
    for number, segment in enumerate(_segments(model)):
        named = [_key(layer) for layer in segment]
        # That of shortcuts without names of their own, as in Xception.
        other = next(filter(None, named), f"{id(model)}/{number}")
        for layer, key in zip(segment, named):
            if not key and is_functional(layer):
                yield from _keyed(layer)
                continue
            inside = [] if key else _blocks_inside(layer)
            yield from ((f"{id(layer)}/{place}", part) for place, part in enumerate(inside))
            if not inside:
                yield key or other, layer


def _key(layer: keras.layers.Layer) -> str:
    """Returns the block that a layer's name gives; empty: none."""
    match = _BLOCK.match(layer.name)
    return next(filter(None, match.groups())) if match else ""


def _segments(model: keras.Model) -> Iterator[Block]:
    """Yields the layers with weights between two places where a model has a single tensor."""
    inside = [model]
    if computes_its_graph(model) and len(model.inputs) == len(model.outputs) == 1:
        inside = cut(model)
    seen: set[int] = set()
    for part in inside:
        layers = [own for own in part.layers if own.weights and id(own) not in seen]
        seen |= {id(own) for own in layers}
        if inside == [model]:
            yield from ([own] for own in layers)
        elif layers:
            yield layers


def _blocks_inside(layer: keras.layers.Layer) -> Block:
    """Returns the layers of a layer, if several of them are of the same composite class."""
    inside = layer._flatten_layers(recursive=False, include_self=False)
    children = [own for own in inside if own.weights]
    kinds = [type(own) for own in children if len(layers_in(own)) > 1]
    theirs = {id(variable) for child in children for variable in child.weights}
    all_inside = theirs.issuperset(id(variable) for variable in layer.weights)
    return children if all_inside and len(kinds) > len(set(kinds)) else []


def _has_kernel(layer: keras.layers.Layer) -> bool:
    return any(len(variable.shape) > 1 for variable in layer.weights)
