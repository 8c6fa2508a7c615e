"""Copies of Keras models, with the same weights and other layers."""

from __future__ import annotations

from collections.abc import Callable

import keras

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.models.blocks import copy_trainable
from imagenet_fast.models.graph import has_own_call, is_functional


def copy_model(
    model: keras.Model,
    image_shape: tuple[int | None, int | None, int],
    copy_layer: Callable[[keras.layers.Layer], keras.layers.Layer],
) -> keras.Model:
    """Returns a copy of a model in the strategy's scope, with the same weights if it has some.

    Args:
        model: functional or sequential.
        image_shape: of its input, without the batch.
        copy_layer: returns a layer, without weights, with weights of the same shapes; called once
            for each layer, but not for models inside.

    Raises:
        UserError: if it, or a model in it, is of another kind, or Keras cannot copy it.
    """
    if not _can_be_copied(model):
        raise UserError(
            f"{type(model).__name__} is a subclass of keras.Model, of which Keras cannot make a "
            "copy for these devices and this precision: give a function that makes it, as in "
            f"model=lambda num_classes, image_shape: {type(model).__name__}(...)"
        )
    copies: dict[int, keras.layers.Layer] = {}

    def copy(layer: keras.layers.Layer) -> keras.layers.Layer:
        # One copy of a layer, of which the model and models inside it may share the weights.
        if id(layer) not in copies:
            copies[id(layer)] = copy_once(layer)
        return copies[id(layer)]

    def copy_once(layer: keras.layers.Layer) -> keras.layers.Layer:
        if not isinstance(layer, keras.Model):
            return copy_layer(layer)
        if not _can_be_copied(layer):
            raise ValueError(f"{type(layer).__name__} in it is a subclass of keras.Model")
        return clone(layer)

    def clone(original: keras.Model) -> keras.Model:
        cloned = keras.models.clone_model(original, clone_function=copy)
        # Keras clones a subclass as a plain model, unless its __init__ is that of one.
        if has_own_call(original) and type(cloned) is not type(original):
            raise ValueError(f"{type(original).__name__} has a call of its own")
        return cloned

    try:
        network = clone(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name} cannot be copied ({first_line(error)}): give a function that "
            "makes it instead"
        ) from error
    if model.built and not network.built:
        network.build((None, *image_shape))
    if model.built and len(network.weights) != len(model.weights):
        raise UserError(
            f"model {model.name} cannot be copied (its layers share weights in a way that Keras "
            "does not copy): give a function that makes it instead"
        )
    # First: a layer's weights come in the order of trainable and other ones.
    copy_trainable(model, network)
    if model.built:
        # Of a shape-only model, large weights have no values.
        pairs = zip(network.weights, model.get_weights())
        given = [(own, value) for own, value in pairs if tuple(own.shape) == value.shape]
        assign_everywhere([own for own, _ in given], [value for _, value in given])
    return network


def _can_be_copied(model: keras.Model) -> bool:
    return isinstance(model, keras.Sequential) or is_functional(model)
