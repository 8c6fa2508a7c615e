"""Translates a model's configuration in files of Keras 2 and tf_keras to that of Keras 3."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from imagenet_fast.base.keras_2 import KERAS_2

# Arguments that layers of Keras 3 lack: any values, or those that change nothing.
_LACKING: dict[str, Any] = {
    **dict.fromkeys(("groups", "kernel_initializer", "kernel_regularizer", "kernel_constraint")),
    **dict.fromkeys(("query_shape", "key_shape", "value_shape", "rng_type", "implementation")),
    "time_major": False,
    "softmax_robust_masking": False,
}
_CONSTANT = "_CONSTANT_VALUE"


def arguments_of_keras_3(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of one of Keras' classes, or of one derived from it, for Keras 3.

    Any version of Keras may have written them. If they are Keras 3's, or Keras 2 is installed, they
    are returned unchanged.
    """
    if KERAS_2:
        return dict(config)
    layer = getattr(keras.layers, name, None)
    known = inspect.signature(layer).parameters if layer is not None else _LACKING
    kept = {
        key: value
        for key, value in config.items()
        if key in known or key not in _LACKING or _LACKING[key] not in (None, value)
    }
    axis = config.get("axis")
    if name.endswith("BatchNormalization") and isinstance(axis, list) and len(axis) == 1:
        kept["axis"] = axis[0]
    if name in ("Functional", "Model") and isinstance(config.get("layers"), list):
        nodes = [node for layer in config["layers"] for node in layer.get("inbound_nodes", ())]
        if any(isinstance(node, list) for node in nodes):
            kept.update(_graph(config))
    return kept


def _graph(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layers, inputs and outputs of a functional model.

    Calls of layers become dicts, and those of models inside are counted from 0, not 1. Layers are
    built by their calls, not by a shape alone.
    """
    first = {layer["name"]: _first_call(layer) for layer in config["layers"]}
    layers = [
        {
            **{key: value for key, value in layer.items() if key != "build_config"},
            "inbound_nodes": [_call(node, first) for node in layer["inbound_nodes"]],
        }
        for layer in config["layers"]
    ]
    kinds = {layer["name"]: layer["class_name"] for layer in config["layers"]}

    def place(name: str, call: int, output: int) -> list[Any]:
        # Keras 3 itself counts outputs of functional models from 1.
        return [name, call - (first[name] if kinds[name] == "Sequential" else 0), output]

    inputs, outputs = (
        _with_places(_only(config[key]), first, place) for key in ("input_layers", "output_layers")
    )
    return {"layers": layers, "input_layers": inputs, "output_layers": outputs}


def _first_call(layer: Mapping[str, Any]) -> int:
    """Returns the number of a layer's first call: 1 of a model, whose own graph counts as one."""
    inside = layer["config"].get("layers")
    if not inside:
        return 0
    return int(layer["class_name"] != "Sequential" or inside[0]["class_name"] == "InputLayer")


def _call(node: list[Any], first: Mapping[str, int]) -> dict[str, Any]:
    """Returns a call of a layer; in Keras 2 a list of places, the last with other arguments."""
    places = [node] if isinstance(node[0], str) else node

    def tensor(name: str, call: int, output: int) -> dict[str, Any]:
        # Keras looks the tensor up, whatever its shape and type are said to be.
        history = [name, call - first[name], output]
        config = {"shape": [], "dtype": "float32", "keras_history": history}
        return {"class_name": "__keras_tensor__", "config": config}

    inputs = [of if name == _CONSTANT else tensor(name, at, of) for name, at, of, *_ in places]
    arguments = places[-1][3] if len(places[-1]) > 3 else {}
    return {"args": [_only(inputs)], "kwargs": _with_places(arguments, first, tensor)}


def _with_places(
    value: Any, names: Mapping[str, int], change: Callable[[str, int, int], Any]
) -> Any:
    """Returns a structure with each ``[layer, call, output]`` in it changed."""
    if isinstance(value, dict):
        return {key: _with_places(part, names, change) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) in (3, 4) and isinstance(value[0], str) and value[0] in names:
        return change(*value[:3])
    return [_with_places(part, names, change) for part in value]


def _only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
