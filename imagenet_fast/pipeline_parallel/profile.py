"""Costs of the blocks of a network: counted, or measured on a device."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tqdm import tqdm

from imagenet_fast.base.keras_2 import layers_in, tensorflow_variables
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.layers.seeds import draw_by_replica
from imagenet_fast.models.graph import is_functional
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.pipeline_parallel.flops import flops
from imagenet_fast.pipeline_parallel.programs import Programs, floats_of
from imagenet_fast.pipeline_parallel.simulation import BlockCost
from imagenet_fast.pipeline_parallel.stage import Stage
from imagenet_fast.pipeline_parallel.subgraph import operations_behind

Work = Callable[[Sequence[tf.Operation]], float]
_Blocks = Sequence[keras.layers.Layer]


def estimate(
    blocks: _Blocks, inputs: Any, micro_batch_size: int, work: Work = flops
) -> list[BlockCost]:
    """Counts the work of blocks, in FLOPs or otherwise, and their bytes.

    Equal blocks are counted once. No weights are allocated: existing ones may have no memory
    (``models.shape_only``), and of blocks without weights, copies of that kind are counted. To be
    called outside of a strategy's scope.

    Args:
      blocks: consecutive, each of one argument, a tensor or a structure of tensors.
      inputs: specs of the first block's inputs, as ``tf.TensorSpec``, of any batch size.
      micro_batch_size: examples in a micro-batch.
      work: returns the work of a pass from its operations.

    Returns:
      The cost of each block. The first one needs no gradients of its inputs.

    Raises:
      UserError: if a block does what a pipeline does not support.
      NotImplementedError: if a block has no ``get_config``, by which to copy it.
    """
    cost = functools.partial(_count, work=work)
    return _each(blocks, inputs, micro_batch_size, "counting", cost)


def measure(
    blocks: _Blocks, inputs: Any, micro_batch_size: int, device: str, repeats: int = 5
) -> list[BlockCost]:
    """Measures the seconds of blocks, and counts their bytes.

    Like :func:`estimate`, but each block is copied to the device, by its configuration and with new
    weights, which are freed before the next block.

    Args:
      blocks: as of :func:`estimate`.
      inputs: as of :func:`estimate`.
      micro_batch_size: examples in a micro-batch.
      device: on which to measure.
      repeats: number of timings of each pass; their median counts.

    Returns:
      The costs, with seconds for the forward and backward passes.

    Raises:
      UserError: as of :func:`estimate`.
      NotImplementedError: as of :func:`estimate`.
    """

    def cost(block: keras.layers.Layer, specs: Any, first: bool) -> tuple[BlockCost, Any]:
        counted, outputs = _count(block, specs, first)
        forward, backward = _seconds(block, specs, first, device, repeats)
        gc.collect()  # reference cycles of functions hold the weights
        return counted._replace(forward=forward, backward=backward), outputs

    return _each(blocks, inputs, micro_batch_size, f"timing on {device}", cost)


def _each(
    blocks: _Blocks,
    inputs: Any,
    micro_batch_size: int,
    label: str,
    cost: Callable[[keras.layers.Layer, Any, bool], tuple[BlockCost, Any]],
) -> list[BlockCost]:
    """Returns the costs of each block, computed once for equal ones."""
    specs = tf.nest.map_structure(
        lambda own: tf.TensorSpec([micro_batch_size, *own.shape[1:]], own.dtype), inputs
    )
    known: dict[Any, tuple[BlockCost, Any]] = {}
    costs = []
    for place, block in enumerate(
        tqdm(blocks, label, unit=" blocks", dynamic_ncols=True, disable=None)
    ):
        try:
            kind = (block_kind(block, specs), place == 0)
        except NotImplementedError as error:
            raise NotImplementedError(f"{block.name!r} has no get_config") from error
        if kind not in known:
            known[kind] = cost(block, specs, place == 0)
        counted, specs = known[kind]
        costs.append(counted._replace(name=block.name))
    return costs


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


def _count(
    block: keras.layers.Layer, specs: Any, first: bool, work: Work = flops
) -> tuple[BlockCost, Any]:
    """Returns the cost of a block, and the specs of its outputs."""
    if not block.built:
        with shape_only():
            block = _copy(block, specs)
    draw_by_replica(block)
    stage = Stage([block], "CPU:0")
    programs = Programs(stage, specs, (), None, first, recomputes=False)
    forward, backward, needed_inputs, needed_outputs = _passes(stage, specs, first)
    trained = {id(variable) for variable in stage.variables}
    other = [variable for variable in block.weights if id(variable) not in trained]
    cost = BlockCost(
        name=block.name,
        forward=work(forward),
        backward=work(backward),
        parameters=sum(variable.shape.num_elements() for variable in stage.variables),
        parameter_bytes=_bytes(tensorflow_variables(stage.variables)),
        other_bytes=_bytes(tensorflow_variables(other)),
        input_bytes=_bytes(specs),
        needed_input_bytes=_bytes(needed_inputs),
        output_bytes=_bytes(programs.outputs),
        needed_output_bytes=_bytes(needed_outputs),
        activation_bytes=_bytes(programs.activations),
    )
    return cost, programs.outputs.values


def _passes(stage: Stage, specs: Any, first: bool) -> tuple[Sequence[Any], ...]:
    """Returns forward and backward operations, and the inputs and outputs the latter use."""
    found: list[Any] = []

    def both(inputs: Any) -> None:
        watched = [] if first else floats_of(inputs)
        with tf.GradientTape() as tape, micro_batch(0):
            tape.watch(watched)
            outputs = stage(inputs, training=True)
        forward = len(tf.compat.v1.get_default_graph().get_operations())
        variables = tensorflow_variables(stage.variables)
        computed = tape.gradient(floats_of(outputs), [*variables, *watched])
        gradients = [tf.convert_to_tensor(own) for own in computed if own is not None]
        found.extend((forward, gradients, tf.nest.flatten(inputs), tf.nest.flatten(outputs)))

    graph = tf.function(both, autograph=False).get_concrete_function(specs).graph
    count, gradients, *ends = found
    forward = graph.get_operations()[:count]
    backward = operations_behind(gradients, forward)
    used = {tensor.ref() for operation in backward for tensor in operation.inputs}
    return forward, backward, *([value for value in end if value.ref() in used] for end in ends)


def _seconds(
    block: keras.layers.Layer, specs: Any, first: bool, device: str, repeats: int
) -> tuple[float, float]:
    """Returns the times of the forward and backward passes."""
    with tf.device(device):
        stage = Stage([_copy(block, specs)], device)
        draw_by_replica(stage.blocks[0])
        programs = Programs(stage, specs, (), None, first, recomputes=False)
        inputs, upstream = tf.nest.map_structure(_random, (specs, floats_of(programs.outputs)))
        of = (tf.constant(0), tf.constant(1.0))

    @tf.function(autograph=False)
    def forward(inputs: Any) -> Any:
        with tf.device(device):
            return programs.forward(*of, inputs, (), programs.zeros(), keep=True)

    @tf.function(autograph=False)
    def backward(inputs: Any, upstream: Any, activations: Any) -> Any:
        with tf.device(device):
            sums = programs.zeros()
            return programs.backward(*of, inputs, (), upstream, activations, sums)[1:]

    _, activations, _ = forward(inputs)
    return (
        _median(lambda: forward(inputs), repeats),
        _median(lambda: backward(inputs, upstream, activations), repeats),
    )


def _copy(block: keras.layers.Layer, specs: Any) -> keras.layers.Layer:
    """Returns a copy with new weights, on the device in scope."""
    if is_functional(block):
        return keras.models.clone_model(block)  # whatever the classes of its layers
    # For inner layers that are not registered with Keras, and for Python lambdas.
    classes = {type(layer).__name__: type(layer) for layer in layers_in(block)}
    config = keras.saving.serialize_keras_object(block)
    try:
        copy = keras.saving.deserialize_keras_object(config, classes, safe_mode=False)
    except TypeError as error:  # its __init__ does not take what Keras' own get_config returns
        raise NotImplementedError(f"{block.name!r} has no get_config") from error
    copy(tf.nest.map_structure(lambda own: keras.Input(own.shape[1:], dtype=own.dtype), specs))
    return copy


def _median(call: Callable[[], object], repeats: int) -> float:
    """Returns the median seconds of a call, without the first, which may be traced."""
    times = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        return tf.cast(tf.random.normal(spec.shape), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _bytes(values: Any) -> int:
    """Returns the size of tensors or their specs in bytes, without those of unknown shape.

    Only the small reserve space of cuDNN's batch norm has an unknown shape.
    """
    known = [value for value in tf.nest.flatten(values) if value.shape.is_fully_defined()]
    return sum(value.shape.num_elements() * value.dtype.size for value in known)
