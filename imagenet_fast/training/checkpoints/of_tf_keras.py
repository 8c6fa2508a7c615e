"""Weights in checkpoints of the versions on tf_keras (Keras 2), which named objects otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from imagenet_fast.training.checkpoints.sizes import OBJECT_GRAPH

_WEIGHT = re.compile(r"model/(?!optimizer/).*/\.ATTRIBUTES/VARIABLE_VALUE")
_LAYER = re.compile(r"layer_with_weights-(\d+)/")


def is_of_tf_keras(path: str) -> bool:
    """Returns whether tf_keras' objects are in a checkpoint that can be read."""
    try:
        names = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (ValueError, tf.errors.OpError):  # explained where it is restored
        return False
    return any(map(_WEIGHT.fullmatch, names))


def weights_of_tf_keras(path: str, names: Sequence[str]) -> list[np.ndarray]:
    """Reads a model's weights.

    Args:
      path: of a checkpoint, for which :func:`is_of_tf_keras` is true.
      names: of the weights, ``layer/weight``.

    Returns:
      The values, in the order of the names.

    Raises:
      ValueError: if one is not there.
    """
    reader, keys = tf.train.load_checkpoint(path), _keys(path, names)
    return [reader.get_tensor(keys[name]) for name in names]


def shadows_of_tf_keras(path: str, shadow: str, names: Sequence[str]) -> list[np.ndarray]:
    """Reads a copy of a model's weights: their average, or lookahead's slow weights.

    Args:
      path: as of :func:`weights_of_tf_keras`.
      shadow: ``weight_averages`` or ``slow_weights``.
      names: of the weights that have a copy.

    Returns:
      The values, in the order of the names.

    Raises:
      ValueError: if one is not there.
    """
    reader, keys = tf.train.load_checkpoint(path), _keys(path, names)
    # By number, in the order in which tf_keras lists the layers of a model.
    order = [[int(number) for number in _LAYER.findall(keys[name])] for name in names]
    values: dict[int, np.ndarray] = {}
    for number, index in enumerate(
        sorted(range(len(names)), key=lambda index: (order[index], index))
    ):
        key = f"{shadow}/{number}/.ATTRIBUTES/VARIABLE_VALUE"
        if not reader.has_tensor(key):
            raise ValueError(f"it has no {shadow} of {names[index]}")
        values[index] = reader.get_tensor(key)
    return [values[index] for index in range(len(names))]


def _keys(path: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the keys of weights in a checkpoint by their names."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        tf.train.load_checkpoint(path).get_tensor(OBJECT_GRAPH)
    )
    keys = {
        entry.full_name: entry.checkpoint_key
        for node in graph.nodes
        for entry in node.attributes
        if _WEIGHT.fullmatch(entry.checkpoint_key)
    }
    for name in names:
        if name not in keys:
            raise ValueError(f"it has no {name}")
    return keys
