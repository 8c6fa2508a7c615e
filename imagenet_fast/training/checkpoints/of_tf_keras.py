"""Weights in checkpoints of the versions on tf_keras (Keras 2), which named objects otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models.graph import is_functional
from imagenet_fast.training.checkpoints.sizes import OBJECT_GRAPH

_WEIGHT = re.compile(r"model/(?!optimizer/).*/\.ATTRIBUTES/VARIABLE_VALUE")
_LAYER = re.compile(r"layer_with_weights-(\d+)/")
# What Keras numbers, as conv2d_1.
_NUMBERED = re.compile(r"(.*?)(?:_(\d{1,9}))?")


def is_of_tf_keras(path: str) -> bool:
    """Returns whether tf_keras' objects are in a checkpoint that can be read."""
    try:
        names = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (ValueError, tf.errors.OpError):  # explained where it is restored
        return False
    return any(map(_WEIGHT.fullmatch, names))


def keys_of_tf_keras(path: str, model: keras.Model) -> list[str]:
    """Finds the keys of a model's weights by their names or, if these differ, by their places.

    Keras 3 has other names for weights of sequential models and depthwise convolutions, and the
    numbers in names depend on the layers made before.

    Raises:
      ValueError: if one is not there.
    """
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        tf.train.load_checkpoint(path).get_tensor(OBJECT_GRAPH)
    )
    names = {
        entry.checkpoint_key: entry.full_name
        for node in graph.nodes
        for entry in node.attributes
        if _WEIGHT.fullmatch(entry.checkpoint_key)
    }
    wanted = [name_of(weight) for weight in model.weights]
    keys = {name: key for key, name in names.items()}
    if len(set(wanted)) == len(wanted) and len(keys) == len(names) and keys.keys() >= set(wanted):
        return [keys[name] for name in wanted]
    places = dict(_places(model, "model/", names))
    found = [places[id(weight)] for weight in model.weights]
    there = [names[key] for key in found]
    # Layers in another order would have their names in another order.
    for name, other, same in zip(wanted, there, map(_equal, _parts(wanted), _parts(there))):
        if not same:
            raise ValueError(f"it has {other} in the place of {name}")
    return found


def weights_of_tf_keras(path: str, keys: Sequence[str]) -> list[np.ndarray]:
    """Reads a model's weights, of the keys that :func:`keys_of_tf_keras` returns."""
    reader = tf.train.load_checkpoint(path)
    return [reader.get_tensor(key) for key in keys]


def shadows_of_tf_keras(path: str, shadow: str, keys: Sequence[str]) -> list[np.ndarray]:
    """Reads a copy of a model's weights, in the order of their keys.

    ``shadow`` is ``weight_averages`` or ``slow_weights``; ``keys`` are of the weights that have a
    copy.

    Raises:
      ValueError: if one is not there.
    """
    reader = tf.train.load_checkpoint(path)
    # By number, in the order in which tf_keras lists the layers of a model.
    order = [[int(number) for number in _LAYER.findall(key)] for key in keys]
    values: dict[int, np.ndarray] = {}
    for number, index in enumerate(
        sorted(range(len(keys)), key=lambda index: (order[index], index))
    ):
        key = f"{shadow}/{number}/.ATTRIBUTES/VARIABLE_VALUE"
        if not reader.has_tensor(key):
            raise ValueError(f"it has no {shadow} of {keys[index]}")
        values[index] = reader.get_tensor(key)
    return [values[index] for index in range(len(keys))]


def _places(
    layer: keras.layers.Layer, prefix: str, names: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """Yields the id of each weight in a layer, and its key."""
    inside = {key: name for key, name in names.items() if key.startswith(prefix)}
    if is_functional(layer):
        layers = [part for part in layer.layers if part.weights]
        prefixes = [f"{prefix}layer_with_weights-{number}/" for number in range(len(layers))]
        if any(not key.startswith(tuple(prefixes)) for key in inside):
            raise ValueError(f"it has other layers in {layer.name}")
        for part, start in zip(layers, prefixes):
            yield from _places(part, start, inside)
        return
    wanted = _parts([name_of(weight) for weight in layer.weights])
    there = dict(zip(inside, _parts([*inside.values()])))
    for weight, parts in zip(layer.weights, wanted):
        found = [key for key, other in there.items() if _equal(parts, other)]
        if len(found) != 1:
            raise ValueError(f"it has no {name_of(weight)}")
        yield id(weight), found[0]


def _equal(parts: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two names are the same, as far as the shorter one goes from the end."""
    length = min(len(parts), len(other))
    return parts[-length:] == other[-length:]


def _parts(names: Sequence[str]) -> list[list[str]]:
    """Returns the parts of weights' names, without what depends on the version and other models.

    Numbers are replaced by their places in the order of all numbers after the same words.
    """
    split = [[_NUMBERED.fullmatch(part) for part in name.split("/")] for name in names]
    numbers: dict[str, set[int]] = {}
    for parts in split:
        for part in parts:
            assert part is not None
            numbers.setdefault(part[1], set()).add(int(part[2] or 0))
    order = {word: sorted(values) for word, values in numbers.items()}
    plain = [
        [f"{part[1]} {order[part[1]].index(int(part[2] or 0))}" for part in parts if part]
        for parts in split
    ]
    pointwise = {tuple(parts[:-1]) for parts in plain if parts[-1].startswith("pointwise_kernel")}
    for own in plain:
        # What is the kernel of a depthwise convolution in Keras 3.
        if own[-1].startswith("depthwise_kernel") and tuple(own[:-1]) not in pointwise:
            own[-1] = own[-1].removeprefix("depthwise_")
    return plain
