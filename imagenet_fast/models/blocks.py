"""Functional Keras models as sequences of blocks, between which a pipeline can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError


def cut(model: keras.Model) -> list[keras.Model]:
    """Cuts a model wherever what follows needs the outputs of one layer only.

    All calls of a layer, and of layers that share weights with it, are in one block, as is a model
    that is a layer of another.

    Args:
        model: functional, of one input and one output.

    Returns:
        The blocks, models that share the layers of the first, each with the name of its last
        layer. A block takes what the one before returns: a tensor or, where a layer returns
        several, a list of tensors.

    Raises:
        UserError: if the model is none of that kind.
    """
    check_functional(model)
    blocks = []
    inputs = model.inputs
    for name, outputs in _ends(model):
        blocks.append(keras.Model(inputs, outputs, name=name))  # lists of one count as that one
        inputs = outputs
    return blocks


def check_functional(model: Any) -> None:
    """Checks that a model can be cut.

    Raises:
        UserError: if it is not functional, or has several inputs or outputs.
    """
    if not getattr(model, "_is_graph_network", False):
        raise UserError(
            f"a {type(model).__name__} cannot be cut into blocks, but only a Keras model that is "
            "functional, or sequential with a keras.Input; of another, write the blocks yourself"
        )
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise UserError(
            f"model {model.name!r} has {len(model.inputs)} inputs and {len(model.outputs)} "
            "outputs, but to be cut into blocks it has to have one of each"
        )


def _ends(model: keras.Model) -> list[tuple[str, list[Any]]]:
    """Returns the name of each block's last layer, and those of its outputs that are needed."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [own for depth in depths for own in model._nodes_by_depth[depth] if not own.is_input]
    last_use = {id(tensor): i for i, node in enumerate(nodes) for tensor in node.keras_inputs}
    last_use[id(model.outputs[0])] = len(nodes)
    parts = [_parts(node.layer) for node in nodes]
    last_call = {part: i for i, own in enumerate(parts) for part in own}
    found = []
    # Tensors that are needed later, and the place until which a layer is called again.
    crossing, busy_until = {id(model.inputs[0])}, 0
    for i, node in enumerate(nodes):
        outputs = tf.nest.flatten(node.outputs)
        if not any(id(own) in last_use for own in outputs):
            raise UserError(
                f"layer {node.layer.name!r} leads nowhere, as it is with add_loss or add_metric of "
                "a model, and would be in no block: add losses and metrics in a layer's call"
            )
        crossing |= {id(own) for own in outputs}
        crossing = {own for own in crossing if last_use.get(own, -1) > i}
        busy_until = max(busy_until, *(last_call[part] for part in parts[i]))
        needed = [own for own in outputs if id(own) in crossing]
        if needed and len(crossing) == len(needed) and busy_until <= i and _can_be_passed(needed):
            found.append((node.layer.name, needed))
    return found


def _parts(layer: keras.layers.Layer) -> set[int]:
    """Returns what stands for a layer, and all that it may share with another."""
    return {id(own) for own in (layer, *layer.variables)}


def _can_be_passed(tensors: Sequence[Any]) -> bool:
    """Returns whether these can be the inputs of a model."""
    return all(
        isinstance(own.type_spec, tf.TensorSpec)
        and own.shape.rank is not None
        and getattr(own, "_keras_mask", None) is None
        for own in tensors
    )
