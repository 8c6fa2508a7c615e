"""The graph of a functional model: its layers' calls and what they need of each other.

Keras has no public names for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras


class Call(NamedTuple):
    """A call of a layer, and the symbolic tensors that it takes and returns."""

    layer: keras.layers.Layer
    inputs: list[Any]
    outputs: list[Any]


def is_functional(model: Any) -> bool:
    """Returns whether a model has a graph: a functional one, or a sequential one with an input."""
    return functional_inside(model) is not None


def computes_its_graph(model: Any) -> bool:
    """Returns whether a model has a graph, which is what a call of it computes."""
    return is_functional(model) and not has_own_call(model)


def has_own_call(model: Any) -> bool:
    """Returns whether the class of a model, or of a layer, has a ``call`` that is not Keras'."""
    module = getattr(getattr(type(model), "call", None), "__module__", "")
    return module.partition(".")[0] not in ("keras", "tf_keras")


def last_layer(model: keras.Model) -> keras.layers.Layer | None:
    """Returns the layer that makes a model's only output; None if it is unknown."""
    if has_own_call(model):
        return None
    if isinstance(model, keras.Sequential):
        return model.layers[-1] if model.layers else None
    if not is_functional(model) or len(model.outputs) != 1:
        return None
    history = model.outputs[0]._keras_history
    return getattr(history, "operation", None) or history.layer  # the latter in Keras 2


def calls(model: keras.Model) -> Iterator[Call]:
    """Yields the calls of a functional model's layers, each after those that it depends on."""
    nodes_by_depth = functional_inside(model)._nodes_by_depth
    for depth in sorted(nodes_by_depth, reverse=True):
        for node in nodes_by_depth[depth]:
            if not node.is_input:
                yield Call(node.operation, node.input_tensors, node.outputs)


def functional_inside(model: Any) -> Any:
    """Returns the model that has the graph: itself, or the one in a sequential model; or None."""
    if isinstance(model, keras.Sequential) and hasattr(model, "_functional"):
        return model._functional  # the functional model inside, in Keras 3; None: not built yet
    if getattr(model, "_is_graph_network", True) and hasattr(model, "_nodes_by_depth"):
        return model
    return None
