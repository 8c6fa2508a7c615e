"""Weights and class names of a SavedModel, read as data: TensorFlow would run its graph."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2, trackable_object_graph_pb2

from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import Path
from imagenet_fast.training.checkpoints.sizes import OBJECT_GRAPH, claimed_too_large

# Of large networks with 20,000 classes, 10 MB; in memory it may be 70 times as large.
_LARGEST_GRAPH = 2**24
# Variables in what tf_keras' ``model.save`` writes that are no weights.
_NO_WEIGHTS = ("optimizer/", "keras_api/")


def read_saved_model(path: Path, limit: int) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Returns what fine-tuning needs of a SavedModel that ``export``, or tf_keras, wrote.

    Its weights may have ``limit`` bytes.

    Returns:
      The floating-point weights by name, such as ``stem_conv/kernel``, and the classes: none of a
      model of tf_keras, which has no class names.

    Raises:
      OSError: if a file cannot be read.
      ValueError: if it is damaged, its weights are larger, or something else wrote it.
      tf.errors.OpError: if its weights are damaged.
    """
    return _variables(str(path / "variables" / "variables"), limit), _labels(path)


def _variables(prefix: str, limit: int) -> dict[str, np.ndarray]:
    refused = claimed_too_large(prefix)
    if refused:
        raise ValueError(refused)
    reader = tf.train.load_checkpoint(prefix)
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    if dtypes.get(OBJECT_GRAPH) != tf.string or shapes[OBJECT_GRAPH]:
        raise ValueError(f"{prefix} does not name its variables")
    try:
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
            reader.get_tensor(OBJECT_GRAPH)
        )
    except DecodeError:
        raise ValueError(f"the names of variables in {prefix} are damaged") from None
    # A dict of weights by number and name; in older exports a list, of variables with these names.
    places = {
        child.node_id: child.local_name.partition("/")[2]
        for node in graph.nodes
        for child in node.children
    }
    keys = {
        places.get(number) or attribute.full_name: attribute.checkpoint_key
        for number, node in enumerate(graph.nodes)
        for attribute in node.attributes
        if not attribute.checkpoint_key.startswith(_NO_WEIGHTS)
    }
    lacking = [key for key in keys.values() if key not in dtypes]
    if lacking:
        raise ValueError(f"{prefix} lacks {lacking[0]}")
    floating = {name: key for name, key in keys.items() if dtypes[key].is_floating}
    # Several names may be of one variable.
    size = sum(int(np.prod(shapes[key])) * dtypes[key].size for key in floating.values())
    if size > limit:
        raise ValueError(f"its weights have {size:,} bytes, but may have {limit:,} here")
    return {name: reader.get_tensor(key) for name, key in floating.items()}


def _labels(path: Path) -> tuple[str, ...]:
    """Returns the constant that the method ``labels`` returns; none of a model of tf_keras."""
    content = read_bounded(path / "saved_model.pb", _LARGEST_GRAPH)
    try:
        (graph,) = saved_model_pb2.SavedModel.FromString(content).meta_graphs
        objects = graph.object_graph_def
        parts = {child.local_name: child.node_id for child in objects.nodes[0].children}
        if "keras_api" in parts:
            return ()
        method = objects.nodes[parts["labels"]]
        (function,) = method.function.concrete_functions
        (bound,) = objects.concrete_functions[function].bound_inputs
        operation = objects.nodes[bound].constant.operation
        (constant,) = (node for node in graph.graph_def.node if node.name == operation)
    except (DecodeError, LookupError, ValueError):
        raise ValueError("saved_model.pb is damaged, or has no class names") from None
    tensor = constant.attr["value"].tensor
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if tensor.dtype != types_pb2.DT_STRING or shape != [len(tensor.string_val)]:
        raise ValueError("the class names in saved_model.pb are no list of texts")
    return tuple(label.decode() for label in tensor.string_val)
