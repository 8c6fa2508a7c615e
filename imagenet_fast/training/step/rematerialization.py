"""Rematerialization: activations that the backward pass computes again instead of storing them.

Chen et al. 2016, "Training deep nets with sublinear memory cost". A network is cut into segments.
The forward pass stores the inputs of each segment; the backward pass computes a segment once more,
now with its activations, right before its gradients. A step takes about one more forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.distribute.one_call import assign_local, local_values
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.graph import calls, computes_its_graph, functional_inside
from imagenet_fast.pipeline_parallel.programs import floats_of, sum_of
from imagenet_fast.training.step.replicated_model import states_in

Blocks = Sequence[keras.Model]
Tensors = list[tf.Tensor]


class Rematerialization:
    """The gradients of a network, with the activations of one segment at a time in memory.

    They are those of an ordinary backward pass, bit by bit unless XLA compiles both. Batch norm's
    moving averages are updated once, and random layers draw the same both times.

    Args:
      network: functional, from normalized images to logits; built.

    Attributes:
      segments: blocks of the network, each called with the outputs of the one before.

    Raises:
      UserError: if the network cannot be cut.
    """

    def __init__(self, network: keras.Model) -> None:
        if KERAS_2:
            raise UserError("rematerialize=always needs Keras 3: install TensorFlow 2.16 or later")
        if not _can_be_cut(network):
            raise UserError(
                f"rematerialize=always: model {network.name} cannot be cut into blocks, only a "
                "functional Keras model with one input and one output, and without a call of its "
                "own: leave it out, and use accumulation_steps"
            )
        blocks = list(_blocks(network))
        if len(blocks) == 1:
            raise UserError(
                f"rematerialize=always: model {network.name} cannot be cut, because there is no "
                "layer on whose outputs alone all that follows depends: leave it out, and use "
                "accumulation_steps"
            )
        self.segments = _segments(blocks)

    def gradients(
        self,
        images: tf.Tensor,
        loss: Callable[[tf.Tensor], tf.Tensor],
        scale: tf.Tensor,
        variables: Sequence[Any],
        states: Sequence[Any] = (),
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """Returns the gradients of a loss, and the logits.

        To be called in a replica.

        Args:
          images: normalized.
          loss: returns the loss of float32 logits, a scalar.
          scale: factor of regularization and ``add_loss``, which are added to the loss.
          variables: to return gradients of, in this order; None: the loss does not depend on it.
          states: variables that all segments update, beside their own.
        """
        inputs: Any = images
        kept = []
        for segment in self.segments[:-1]:
            own = [*(state for block in segment for state in states_in(block)), *states]
            kept.append((segment, inputs, own, local_values(own)))
            inputs, _ = _run(segment, inputs)
        results: dict[int, tf.Tensor | None] = {}
        sources = _trainable(self.segments[-1])
        watched = floats_of(inputs) if kept else []
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs, penalty = _run(self.segments[-1], inputs)
            (logits,) = tf.nest.flatten(outputs)
            logits = tf.cast(logits, tf.float32)
            total = loss(logits)
            if penalty is not None:
                total += scale * penalty
        upstream, found = tape.gradient(total, [watched, sources])
        results.update(zip(map(id, sources), found))
        while any(_trainable(segment) for segment, *_ in kept):  # frozen ones come first
            segment, inputs, own, before = kept.pop()
            upstream, found = _backward(
                segment, inputs, own, before, upstream, scale, watch=bool(kept)
            )
            results.update(zip(map(id, _trainable(segment)), found))
        return [results.get(id(variable)) for variable in variables], logits


def _backward(
    segment: Blocks,
    inputs: Any,
    states: Sequence[Any],
    before: Tensors,
    upstream: Sequence[tf.Tensor | None],
    scale: tf.Tensor,
    *,
    watch: bool,
) -> tuple[list[tf.Tensor | None], list[tf.Tensor | None]]:
    """Computes a segment again, and returns the gradients of its inputs and its variables.

    Args:
      segment: to compute.
      inputs: of it.
      states: variables that it updates; they keep their values.
      before: their values in the forward pass.
      upstream: gradients of its floating-point outputs.
      scale: factor of its penalty.
      watch: whether the gradients of its inputs are needed; else there are none.
    """
    after = local_values(states)
    flat = tf.nest.flatten(inputs)
    arrived = [gradient for gradient in upstream if gradient is not None]
    inputs = tf.nest.pack_sequence_as(inputs, _once_known(arrived, flat))
    assign_local(states, before)
    sources = _trainable(segment)
    watched = floats_of(inputs) if watch else []
    with tf.GradientTape() as tape:
        tape.watch(watched)
        outputs, penalty = _run(segment, inputs)
        pairs = [*zip(floats_of(outputs), upstream)]
        if penalty is not None:
            pairs.append((penalty, scale))
        pairs = [pair for pair in pairs if pair[1] is not None]
    targets, factors = [target for target, _ in pairs], [factor for _, factor in pairs]
    gradients = tape.gradient(targets, [watched, sources], output_gradients=factors)
    assign_local(states, after)
    return gradients


def _run(segment: Blocks, inputs: Any) -> tuple[Any, tf.Tensor | None]:
    """Returns the outputs of a segment in training, and its penalty; None: it has none."""
    penalties = []
    for block in segment:
        inputs = block(inputs, training=True)
        penalties += block.losses
    return inputs, sum_of(penalties) if penalties else None


def _trainable(segment: Blocks) -> list[Any]:
    return [variable for block in segment for variable in block.trainable_variables]


def _once_known(waits: Tensors, values: Tensors) -> Tensors:
    """Returns the values once ``waits`` are known.

    Otherwise what is computed from them would be computed too early, or only once.
    """
    if tf.__internal__.get_enclosing_xla_context():  # for XLA, control dependencies are nothing
        return gen_xla_ops.xla_optimization_barrier(input=[*values, *waits])[: len(values)]
    with tf.control_dependencies(waits):
        return [tf.identity(value) for value in values]


def _blocks(model: keras.Model) -> Iterator[keras.Model]:
    """Yields the blocks of a functional model, and of a model that is all of a block."""
    for block in cut(model):
        inside = [call.layer for call in calls(block)]
        if len(inside) == 1 and _can_be_cut(inside[0]):
            yield from _blocks(inside[0])
        else:
            yield block


def _can_be_cut(model: Any) -> bool:
    if not computes_its_graph(model) or len(model.inputs) != 1 or len(model.outputs) != 1:
        return False
    return not isinstance(functional_inside(model).output, Mapping)  # from which a block takes one


def _segments(blocks: Blocks) -> list[Blocks]:
    """Returns the blocks in segments that need little memory.

    That is for the inputs of all segments and the activations of the largest one. With blocks of
    equal sizes, it is least with about as many segments as there are blocks in each.
    """
    # Without the sizes of images, which are the same for all, all tensors count the same.
    known = None not in blocks[0].inputs[0].shape[1:]
    inside, passed = [], []
    for block in blocks:
        made = [output for call in calls(block) for output in call.outputs]
        inside.append(sum(_bytes(tensor) if known else 1 for tensor in made))
        passed.append(sum(_bytes(tensor) if known else 1 for tensor in block.outputs))

    def memory(ends: list[int]) -> int:
        largest = max(sum(inside[begin:end]) for begin, end in zip([0, *ends], ends))
        return largest + sum(passed[end - 1] for end in ends[:-1])

    packed = (_ends(inside, sum(inside) / count) for count in range(1, len(blocks) + 1))
    best = min(packed, key=memory)
    return [blocks[begin:end] for begin, end in zip([0, *best], best)]


def _ends(sizes: Sequence[int], limit: float) -> list[int]:
    """Returns where groups of consecutive sizes end, whose sums keep a limit if single ones do."""
    ends, total = [], 0
    for place, size in enumerate(sizes):
        if total and total + size > limit:
            ends.append(place)
            total = 0
        total += size
    return [*ends, len(sizes)]


def _bytes(tensor: Any) -> int:
    """Returns the bytes of a symbolic tensor, of one image; unknown dimensions count as 1."""
    entries = math.prod(dimension or 1 for dimension in tensor.shape[1:])
    return entries * tf.as_dtype(tensor.dtype).size
