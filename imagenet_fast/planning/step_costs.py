"""What a replica's training step computes and moves, counted in its graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.config import Config
from imagenet_fast.cost_model.accelerators import Accelerator
from imagenet_fast.cost_model.compute import (
    Efficiency,
    Gradient,
    Operation,
    StepWork,
    operation_seconds,
)
from imagenet_fast.cost_model.pipeline import BlockCost
from imagenet_fast.data.info import read_info
from imagenet_fast.distribute.fusion import creation_order
from imagenet_fast.models import network_of
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.optimizers.by_name import OWN, make_optimizer
from imagenet_fast.optimizers.slots import values_kept
from imagenet_fast.pipeline_parallel.flops import flops, is_matrix, rows
from imagenet_fast.pipeline_parallel.profile import estimate
from imagenet_fast.pipeline_parallel.subgraph import operations_behind
from imagenet_fast.training.build import build_classifier
from imagenet_fast.training.classifier import Classifier

_POOLS = ("MaxPool", "AvgPool", "MaxPoolGrad", "AvgPoolGrad")
_WEIGHTS = ("ReadVariableOp", "Const")
_SUMS = ("Sum", "Mean", "Max", "BiasAddGrad")
# They give another name to memory, or are computed before the program runs.
_NOTHING = {
    *("Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Placeholder", "PreventGradient"),
    *("Rank", "ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Squeeze", "StopGradient"),
}


def count_step(config: Config, images: int, micro_batches: int, slots: float) -> StepWork:
    """Returns what a replica does in each step of the run that ``config`` describes.

    It makes no weights. To be called outside of a strategy's scope.

    Args:
      config: of the run, without pipeline. What mixes images and sums over replicas is left out.
      images: in each micro-batch of the replica.
      micro_batches: in its share of a step.
      slots: values that the optimizer keeps of each trained weight.

    Raises:
      UserError: if the model's options cannot be used.
    """
    model = _model(config, images)
    operations, forward = _operations(model, config, images)
    layers = {layer.name: layer for layer in _leaves(model)}
    kept = _kept(operations, forward)
    return StepWork(
        images=images,
        micro_batches=micro_batches,
        operations=tuple(
            _operation(own, own not in forward, layers)
            for own in operations
            if own.type not in _NOTHING
        ),
        gradients=_gradients(model, layers.values()),
        statistics=tuple(
            own.moving_mean.shape[0]
            for own in layers.values()
            if isinstance(own, keras.layers.BatchNormalization)
        ),
        kept_bytes=_bytes(kept),
        fused_kept_bytes=_bytes({own.ref(): own for own in map(_origin, kept)}.values()),
        unpadded_flops=flops(operations, padding=False),
        precision=config.precision,
        slots=slots,
    )


def slots_of(config: Config) -> float:
    """Returns how many values a run keeps of each weight, besides the weight and its gradient.

    Raises:
      UserError: if there is no such optimizer.
    """
    if config.optimizer in OWN:
        optimizer = OWN[config.optimizer](momentum=config.momentum)
    else:
        optimizer = make_optimizer(
            config.optimizer,
            0.1,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            undecayed=[],
            clip_norm=None,
        )
    return values_kept(optimizer) + bool(config.ema_decay) + bool(config.lookahead_every)


class Block(NamedTuple):
    """A block of a network in a pipeline.

    Attributes:
      cost: in bytes; what is said of its passes is of no use.
      forward: the operations of a forward pass.
      backward: of a backward pass.
    """

    cost: BlockCost
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def count_blocks(config: Config, images: int) -> list[Block]:
    """Returns what the blocks of a network do in a pipeline.

    Args:
      config: of the network.
      images: in a micro-batch.

    Raises:
      UserError: if the model's options cannot be used, or it cannot be cut.
    """
    model = _model(config, images)
    size = config.image_size
    inputs = tf.TensorSpec((None, size, size, 3), model.get_layer("normalize").compute_dtype)
    passes: list[tuple[Operation, ...]] = []

    def number(operations: Sequence[tf.Operation]) -> float:
        """Keeps them, under the number that it returns as their cost."""
        passes.append(
            tuple(_operation(own, False, ()) for own in operations if own.type not in _NOTHING)
        )
        return len(passes) - 1

    costs = estimate(cut(network_of(model)), inputs, images, number)
    return [Block(own, passes[int(own.forward)], passes[int(own.backward)]) for own in costs]


def block_seconds(
    blocks: Iterable[Block], precision: str, accelerator: Accelerator, efficiency: Efficiency
) -> list[BlockCost]:
    """Returns what blocks cost, in seconds of an accelerator's core.

    Args:
      blocks: for a micro-batch.
      precision: the policy of mixed precision.
      accelerator: on which each stage is.
      efficiency: of its software.

    Raises:
      UserError: if the accelerator cannot compute in this precision.
    """

    def seconds(operations: Iterable[Operation]) -> float:
        return sum(operation_seconds(own, precision, accelerator, efficiency) for own in operations)

    return [
        own.cost._replace(forward=seconds(own.forward), backward=seconds(own.backward))
        for own in blocks
    ]


def _model(config: Config, images: int) -> Classifier:
    """Returns the model as on one device with so many images."""
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
    model: Classifier, config: Config, images: int
) -> tuple[list[tf.Operation], set[tf.Operation]]:
    """Returns the operations of both passes that gradients need, and those of the forward pass."""
    counts: list[int] = []

    def both(pixels: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(pixels, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        counts.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(loss, model.trainable_variables)

    size = config.image_size
    specs = tf.TensorSpec([images, size, size, 3], tf.uint8), tf.TensorSpec([images], tf.int32)
    graph = tf.function(both, autograph=False).get_concrete_function(*specs).graph
    everything = graph.get_operations()
    needed = set(operations_behind(graph.outputs))
    forward = set(everything[: counts[-1]])
    return [own for own in everything if own in needed], forward


def _leaves(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that hold no others."""
    layers = [own for own in model.submodules if isinstance(own, keras.layers.Layer)]
    return [
        own for own in layers if not any(isinstance(e, keras.layers.Layer) for e in own.submodules)
    ]


def _operation(operation: tf.Operation, backward: bool, layers: Iterable[str]) -> Operation:
    read, written = (_bytes(ends) for ends in (operation.inputs, operation.outputs))
    moved = fused = read + written
    if is_matrix(operation):
        kind = "matrix"
    elif operation.type == "FusedBatchNormV3":
        # Reads the values for their statistics, and once more to normalize them, which can be done
        # on the way into the next operation.
        kind, value = "normalization", _bytes(operation.inputs[:1])
        moved, fused = 3 * value, value
    elif operation.type == "FusedBatchNormGradV3":
        # Reads values and gradients for sums, then for the gradient of the values, which can be
        # made on the way into the convolution before, twice: of its filter and of its input.
        kind, value = "normalization", _bytes(operation.inputs[:1])
        moved, fused = 5 * value, 4 * value
    elif operation.type in _POOLS:
        kind = "pool"
    else:
        kind, fused = "other", read if operation.type in _SUMS else 0.0
    names = operation.name.split("/")
    return Operation(
        layer=next((name for name in reversed(names[:-1]) if name in layers), ""),
        kind=kind,
        backward=backward,
        flops=flops([operation]),
        rows=rows(operation) if kind == "matrix" else 0,
        bytes=moved,
        fused_bytes=fused,
    )


def _gradients(model: keras.Model, layers: Iterable[keras.layers.Layer]) -> tuple[Gradient, ...]:
    """Returns the gradients in the order in which the variables were made."""
    owners = {own.ref(): layer.name for layer in layers for own in layer.trainable_variables}
    variables = model.trainable_variables
    return tuple(
        Gradient(owners.get(variables[i].ref(), ""), variables[i].shape.num_elements())
        for i in creation_order(variables)
    )


def _kept(operations: Sequence[tf.Operation], forward: set[tf.Operation]) -> list[tf.Tensor]:
    """Returns what the backward pass needs of the forward pass, without weights."""
    weights: set[tf.Operation] = set()
    for own in operations:  # also those in another precision or shape
        if own.type in _WEIGHTS or (own.inputs and all(end.op in weights for end in own.inputs)):
            weights.add(own)
    kept = {
        value.ref(): value
        for own in operations
        if own not in forward
        for value in map(_named_once, own.inputs)
        if value.op in forward and value.op not in weights
    }
    return list(kept.values())


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor of which this one is computed value by value, if it is of a single one."""
    while True:
        tensor = _named_once(tensor)
        operation = tensor.op
        if operation.type == "FusedBatchNormV3":
            tensor = operation.inputs[0]
            continue
        wide = [own for own in operation.inputs if own.shape.rank == tensor.shape.rank]
        values = [own for own in wide if own.shape == tensor.shape]
        by_value = not is_matrix(operation) and operation.type not in _POOLS
        if not by_value or len(values) != 1 or len(wide) != 1:
            return tensor
        (tensor,) = values


def _named_once(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory this one gives another name to."""
    while tensor.op.type in ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims"):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _bytes(tensors: Iterable[tf.Tensor]) -> float:
    """Returns the size of tensors of known shape."""
    known = [own for own in tensors if own.shape.is_fully_defined() and own.dtype != tf.resource]
    return float(sum(own.shape.num_elements() * own.dtype.size for own in known))
