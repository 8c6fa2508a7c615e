"""The FLOPs, memory traffic and activations of a replica's training step, counted in its graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import layers_in, tensorflow_variables
from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.distribute.fusion import creation_order
from imagenet_fast.lab.planning.cost_model.accelerators import Accelerator
from imagenet_fast.lab.planning.cost_model.compute import (
    Efficiency,
    Gradient,
    Operation,
    StepWork,
    operation_seconds,
)
from imagenet_fast.models import network_of
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.optimizers.by_name import OPTIMIZERS, make_optimizer
from imagenet_fast.optimizers.muon import orthogonalize
from imagenet_fast.optimizers.options import OptimizerOptions, UpdateOptions
from imagenet_fast.optimizers.slots import values_kept
from imagenet_fast.pipeline_parallel.flops import flops, is_matrix, rows
from imagenet_fast.pipeline_parallel.profile import estimate
from imagenet_fast.pipeline_parallel.simulation import BlockCost
from imagenet_fast.pipeline_parallel.subgraph import operations_behind
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.optimizer import filters_of
from imagenet_fast.training.build.selection import build_proxy_network, selected_images
from imagenet_fast.training.step.classifier import Classifier

_POOLS = ("MaxPool", "AvgPool", "MaxPoolGrad", "AvgPoolGrad")
_WEIGHTS = ("ReadVariableOp", "Const")
_REDUCTIONS = ("Sum", "Mean", "Max", "BiasAddGrad")
# Operations without cost: they alias memory, or are evaluated before the program runs.
_FREE = {
    *("Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Placeholder", "PreventGradient"),
    *("Rank", "ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Squeeze", "StopGradient"),
}


def count_step(config: Config, images: int, micro_batches: int, slots: float) -> StepWork:
    """Counts a replica's work in a step, without creating weights.

    Call it outside of a strategy's scope.

    Args:
      config: options of a run without pipeline; mixup, cutmix and all-reduces are not counted.
      images: in each micro-batch of the replica, before some are selected.
      micro_batches: in a step.
      slots: optimizer slots per trainable value.

    Raises:
      UserError: if the model's options cannot be used.
    """
    whole = images * micro_batches
    trained = selected_images(config, whole) // micro_batches
    model = _model(config, trained)
    operations, forward = _operations(model, config, trained)
    layers = {layer.name: layer for layer in _leaves(model)}
    kept = _kept(operations, forward)
    selection = _selection(config, whole)
    return StepWork(
        images=images,
        micro_batches=micro_batches,
        operations=_counted(operations, forward, _scopes(operations, layers)),
        gradients=_gradients(model, layers.values()),
        statistics=tuple(
            layer.moving_mean.shape[0]
            for layer in layers.values()
            if isinstance(layer, keras.layers.BatchNormalization)
        ),
        kept_bytes=_bytes(kept),
        fused_kept_bytes=_bytes({tensor.ref(): tensor for tensor in map(_origin, kept)}.values()),
        unpadded_flops=flops(operations, padding=False) + selection.unpadded_flops / micro_batches,
        precision=config.precision,
        slots=slots,
        selection=selection.operations,
        selection_every=config.proxy_every,
        updates=_updates(config, model),
        update_precision="mixed_bfloat16",
    )


class _Selection(NamedTuple):
    """What selects a step's images: its operations, and the mean of its FLOPs."""

    operations: tuple[Operation, ...] = ()
    unpadded_flops: float = 0.0


def _selection(config: Config, images: int) -> _Selection:
    """Counts the forward pass that selects images, and the backward pass of a proxy."""
    if config.select_by_loss == 1:
        return _Selection()
    if not config.proxy_model:
        _, forward = _operations(_model(config, images), config, images)
        return _Selection(_counted(forward), flops(forward, padding=False))
    with shape_only():
        proxy = build_proxy_network(config, len(read_info(config).labels))
    operations, forward = _operations(proxy, config, images)
    backward = [operation for operation in operations if operation not in forward]
    mean = flops(forward, padding=False) + flops(backward, padding=False) / config.proxy_every
    return _Selection(_counted(operations, forward), mean)


def _updates(options: UpdateOptions, model: keras.Model) -> tuple[Operation, ...]:
    """Counts the operations with which Muon orthogonalizes the updates of filters."""
    if options.optimizer != "muon":
        return ()

    def update(matrix: tf.Tensor) -> tf.Tensor:
        return orthogonalize(matrix, options.muon_steps, coefficients=options.muon_coefficients)

    found: list[Operation] = []
    for variable, is_filter in zip(model.trainable_variables, filters_of(model)):
        if is_filter:
            *inputs, outputs = variable.shape
            spec = tf.TensorSpec([math.prod(inputs), outputs])
            graph = tf.function(update, autograph=False).get_concrete_function(spec).graph
            found += _counted(graph.get_operations())
    return tuple(found)


def slots_of(options: OptimizerOptions) -> float:
    """Returns the number of optimizer slots and weight averages per trainable value.

    Raises:
      UserError: if there is no such optimizer.
    """
    if options.optimizer in OPTIMIZERS:
        optimizer = OPTIMIZERS[options.optimizer](momentum=options.momentum)
    else:
        optimizer = make_optimizer(
            options.optimizer,
            0.1,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            undecayed=[],
            clip_norm=None,
        )
    return values_kept(optimizer) + bool(options.ema_decay) + bool(options.lookahead_every)


class Block(NamedTuple):
    """A block of a network in a pipeline.

    Attributes:
      cost: only the bytes are meaningful.
      forward: operations of the forward pass.
      backward: operations of the backward pass.
    """

    cost: BlockCost
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def count_blocks(config: Config, images: int) -> list[Block]:
    """Counts the work of a network's blocks in a pipeline, for micro-batches of ``images``.

    Raises:
      UserError: if the model's options cannot be used, or it cannot be split into blocks.
    """
    model = _model(config, images)
    size = config.image_size
    inputs = tf.TensorSpec((None, size, size, 3), model.get_layer("normalize").compute_dtype)
    passes: list[tuple[Operation, ...]] = []

    def number(operations: Sequence[tf.Operation]) -> float:
        """Appends them to ``passes``, and returns their index in place of a cost."""
        passes.append(_counted(operations))
        return len(passes) - 1

    costs = estimate(cut(network_of(model)), inputs, images, number)
    return [Block(cost, passes[int(cost.forward)], passes[int(cost.backward)]) for cost in costs]


def block_seconds(
    blocks: Iterable[Block], precision: str, accelerator: Accelerator, efficiency: Efficiency
) -> list[BlockCost]:
    """Returns the costs of blocks, in seconds of an accelerator's core, by precision policy.

    Raises:
      UserError: if the accelerator does not support this precision.
    """

    def seconds(operations: Iterable[Operation]) -> float:
        return sum(
            operation_seconds(operation, precision, accelerator, efficiency)
            for operation in operations
        )

    return [
        block.cost._replace(forward=seconds(block.forward), backward=seconds(block.backward))
        for block in blocks
    ]


def _model(config: Config, images: int) -> Classifier:
    """Returns the model as on one device with a batch of ``images``."""
    alone = {
        "batch_size": images,
        "accumulation_steps": 1,
        "pipeline_stages": 1,
        "ema_decay": 0.0,
        "mixup_alpha": 0.0,
        "cutmix_alpha": 0.0,
    }
    if config.batch_norm_batch_size >= images:  # statistics of several replicas, or of this one
        alone["batch_norm_batch_size"] = 0
    with shape_only():
        return build_classifier(config.replace(**alone), read_info(config).labels)


def _operations(
    model: keras.Model, config: Config, images: int
) -> tuple[list[tf.Operation], set[tf.Operation]]:
    """Returns the operations that the gradients depend on, and those of the forward pass."""
    counts: list[int] = []

    def gradients(pixels: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(pixels, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        counts.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(loss, model.trainable_variables)

    size = config.image_size
    specs = tf.TensorSpec([images, size, size, 3], tf.uint8), tf.TensorSpec([images], tf.int32)
    graph = tf.function(gradients, autograph=False).get_concrete_function(*specs).graph
    operations = graph.get_operations()
    needed = set(operations_behind(graph.outputs))
    forward = set(operations[: counts[-1]]) & needed
    return [operation for operation in operations if operation in needed], forward


def _leaves(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that contain no other layers."""
    return [layer for layer in layers_in(model) if len(layers_in(layer)) == 1]


def _scopes(operations: Iterable[tf.Operation], layers: Iterable[str]) -> dict[str, str]:
    """Returns the name of each layer by that of its scope in a graph."""
    seen = {scope for operation in operations for scope in operation.name.split("/")}
    # Before 3.16, Keras 3 opens a layer's scope twice, and TensorFlow numbers the second.
    suffix = "" if "normalize" in seen else "_1"
    return {layer + suffix: layer for layer in layers}


def _counted(
    operations: Iterable[tf.Operation],
    forward: Collection[tf.Operation] | None = None,
    layers: Mapping[str, str] | None = None,
) -> tuple[Operation, ...]:
    """Counts operations that have a cost.

    ``forward`` are those of the forward pass; None: all. ``layers`` are names of layers to which
    they may belong, by scope.
    """
    return tuple(
        _operation(operation, forward is not None and operation not in forward, layers or {})
        for operation in operations
        if operation.type not in _FREE
    )


def _operation(operation: tf.Operation, backward: bool, layers: Mapping[str, str]) -> Operation:
    read, written = (_bytes(ends) for ends in (operation.inputs, operation.outputs))
    moved = fused = read + written
    if is_matrix(operation):
        kind = "matrix"
    elif operation.type == "FusedBatchNormV3":
        # Reads the values for their statistics, and again to normalize them; the latter can be
        # fused with the next operation.
        kind, value = "normalization", _bytes(operation.inputs[:1])
        moved, fused = 3 * value, value
    elif operation.type == "FusedBatchNormGradV3":
        # Reads values and gradients for sums, then again for the values' gradient. The latter can
        # be fused with both gradients of the preceding convolution: its filter's and its input's.
        kind, value = "normalization", _bytes(operation.inputs[:1])
        moved, fused = 5 * value, 4 * value
    elif operation.type in _POOLS:
        kind = "pool"
    else:
        kind, fused = "other", read if operation.type in _REDUCTIONS else 0.0
    scopes = operation.name.split("/")
    return Operation(
        layer=next((layers[scope] for scope in reversed(scopes[:-1]) if scope in layers), ""),
        kind=kind,
        backward=backward,
        flops=flops([operation]),
        rows=rows(operation) if kind == "matrix" else 0,
        bytes=moved,
        fused_bytes=fused,
    )


def _gradients(model: keras.Model, layers: Iterable[keras.layers.Layer]) -> tuple[Gradient, ...]:
    """Returns the gradients in the order in which the variables were created."""
    owners = {
        variable.ref(): layer.name
        for layer in layers
        for variable in tensorflow_variables(layer.trainable_variables)
    }
    variables = tensorflow_variables(model.trainable_variables)
    return tuple(
        Gradient(owners.get(variables[i].ref(), ""), variables[i].shape.num_elements())
        for i in creation_order(variables)
    )


def _kept(operations: Sequence[tf.Operation], forward: set[tf.Operation]) -> list[tf.Tensor]:
    """Returns the forward pass' tensors that the backward pass needs, without weights."""
    weights: set[tf.Operation] = set()
    for operation in operations:  # including casts and reshapes of weights
        if operation.type in _WEIGHTS or (
            operation.inputs and all(end.op in weights for end in operation.inputs)
        ):
            weights.add(operation)
    kept = {
        value.ref(): value
        for operation in operations
        if operation not in forward
        for value in map(_without_aliases, operation.inputs)
        if value.op in forward and value.op not in weights
    }
    return list(kept.values())


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor from which this one is computed element by element, if only from one."""
    while True:
        tensor = _without_aliases(tensor)
        operation = tensor.op
        if operation.type == "FusedBatchNormV3":
            tensor = operation.inputs[0]
            continue
        wide = [value for value in operation.inputs if value.shape.rank == tensor.shape.rank]
        values = [value for value in wide if value.shape == tensor.shape]
        elementwise = not is_matrix(operation) and operation.type not in _POOLS
        if not elementwise or len(values) != 1 or len(wide) != 1:
            return tensor
        (tensor,) = values


def _without_aliases(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory this one aliases."""
    while tensor.op.type in ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims"):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _bytes(tensors: Iterable[tf.Tensor]) -> float:
    """Returns the size of tensors of known shape."""
    known = [
        tensor
        for tensor in tensors
        if tensor.shape.is_fully_defined() and tensor.dtype != tf.resource
    ]
    return float(sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in known))
