"""Cuts functional Keras models into blocks for pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.models.graph import calls, computes_its_graph, functional_inside


def cut(model: keras.Model) -> list[keras.Model]:
    """Cuts a model wherever all that follows depends on the outputs of one layer only.

    All calls of a layer, and of layers that share weights with it, are in one block. A nested model
    is not cut.

    The model must be functional, with one input and one output.

    Returns:
        The blocks: models that share the layers of ``model``, each named after its last layer. A
        block takes the outputs of the one before: a tensor, or a list if a layer has several.

    Raises:
        UserError: if the model is not of this kind.
    """
    check_functional(model)
    blocks = []
    functional = functional_inside(model)
    inputs = functional.input  # a dict of one, if the model was given one
    ends = _ends(model)
    for place, (name, outputs) in enumerate(ends, start=1):
        outputs = functional.output if place == len(ends) else outputs
        block = keras.Model(inputs, outputs, name=name)  # Keras unpacks lists of one
        block._trainable = model._trainable
        blocks.append(block)
        inputs = outputs
    return blocks


def clone(model: keras.Model) -> keras.Model:
    """Returns a functional model with layers and weights of its own, and the same ones trainable.

    Keras' ``clone_model`` does not keep ``trainable`` of the layers of nested models.
    """
    copy = keras.models.clone_model(model)
    copy_trainable(model, copy)
    return copy


def copy_trainable(layer: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Gives a copy of a layer or model, and all layers inside, the original's ``trainable``.

    The copy must be built if the layers inside are made when it is built.
    """
    copy.trainable = layer.trainable  # also of inner layers, whose own follow
    inner = (own._flatten_layers(recursive=False, include_self=False) for own in (layer, copy))
    for pair in zip(*inner):
        copy_trainable(*pair)


def check_functional(model: Any) -> None:
    """Checks that a model can be cut.

    Raises:
        UserError: if it is not functional, or has several inputs or outputs.
    """
    if not computes_its_graph(model):
        raise UserError(
            f"a {type(model).__name__} cannot be cut into blocks, only a functional Keras model, "
            "or a sequential one with a keras.Input, without a call of its own; for other models, "
            "write the blocks yourself"
        )
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise UserError(
            f"model {model.name!r} has {len(model.inputs)} inputs and {len(model.outputs)} "
            "outputs, but to be cut into blocks it must have one of each"
        )


def _ends(model: keras.Model) -> list[tuple[str, list[Any]]]:
    """Returns the name of each block's last layer, and its outputs that later layers need."""
    ordered = list(calls(model))
    last_use = {id(tensor): i for i, call in enumerate(ordered) for tensor in call.inputs}
    last_use[id(model.outputs[0])] = len(ordered)
    parts = [_parts(call.layer) for call in ordered]
    last_call = {part: i for i, layer_parts in enumerate(parts) for part in layer_parts}
    ends = []
    # Tensors needed later, and the last call of any layer so far.
    crossing, busy_until = {id(model.inputs[0])}, 0
    for i, call in enumerate(ordered):
        crossing |= {id(output) for output in call.outputs}
        crossing = {tensor for tensor in crossing if last_use.get(tensor, -1) > i}
        busy_until = max(busy_until, *(last_call[part] for part in parts[i]))
        needed = [output for output in call.outputs if id(output) in crossing]
        if needed and len(crossing) == len(needed) and busy_until <= i and _can_be_passed(needed):
            ends.append((call.layer.name, needed))
    return ends


def _parts(layer: keras.layers.Layer) -> set[int]:
    """Returns the identities of a layer and its variables, which other layers may share."""
    return {id(part) for part in (layer, *getattr(layer, "variables", ()))}  # none: an operation


def _can_be_passed(tensors: Sequence[Any]) -> bool:
    """Returns whether these can be the inputs of a model."""
    return all(
        not getattr(tensor, "sparse", False)
        and not getattr(tensor, "ragged", False)
        and getattr(tensor, "_keras_mask", None) is None
        for tensor in tensors
    )
