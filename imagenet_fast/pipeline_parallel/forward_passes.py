"""The forward passes of evaluation and prediction: micro-batches through all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches, check_outputs
from imagenet_fast.pipeline_parallel.programs import Tensors, read_variables, spec_of, sum_of
from imagenet_fast.pipeline_parallel.stage import Stage, WithMasks, masked, with_masks
from imagenet_fast.pipeline_parallel.subgraph import subgraph


class Forward(NamedTuple):
    """Results of a batch outside of training.

    Attributes:
      outputs: of the last block, with Keras masks.
      penalty: regularization and ``add_loss``, float32.
    """

    outputs: Any
    penalty: tf.Tensor


def forward_passes(stages: Sequence[Stage], inputs: Any, count: int) -> Forward:
    """Computes a batch in micro-batches, outside of training.

    A stage works on one micro-batch at a time, and different stages work at the same time. To be
    called in a ``tf.function``, with built blocks.

    ``count`` is the number of micro-batches of a batch with at least as many examples.
    """
    batch = MicroBatches(with_masks(inputs), (), count)
    programs, (specs, _) = [], batch.specs
    for stage in stages:
        with tf.device(stage.device):
            program, specs = _program(stage, specs)
        programs.append(program)
    check_outputs(specs)
    last = stages[-1].device
    # A batch whose size is known when the graph runs may have fewer examples.
    iterations = tf.minimum(batch.count, batch.examples)
    with tf.device(last):
        rows = [
            tf.TensorArray(spec.dtype, iterations, element_shape=spec.shape, infer_shape=False)
            for spec in tf.nest.flatten(specs)
        ]

    def body(
        number: tf.Tensor, done: Tensors, rows: list[tf.TensorArray], penalties: Tensors
    ) -> Any:
        with tf.device(stages[0].device):
            values = batch.inputs(number)
        for place, (stage, program) in enumerate(zip(stages, programs)):
            with tf.device(stage.device):
                with tf.control_dependencies([done[place]]):
                    received = tf.nest.map_structure(tf.identity, values)
                values, penalty = program(received)
                with tf.control_dependencies(tf.nest.flatten(values)):
                    done[place] = tf.constant(0)
                penalties[place] += batch.fraction(number) * penalty
        with tf.device(last):
            rows = [
                row.write(number, tf.identity(value))
                for row, value in zip(rows, tf.nest.flatten(values))
            ]
        return number + 1, done, rows, penalties

    _, _, rows, penalties = tf.while_loop(
        lambda number, *_: number < iterations,
        body,
        [tf.constant(0), [tf.constant(0)] * len(stages), rows, [tf.constant(0.0)] * len(stages)],
        # Enough iterations at a time to occupy all stages.
        parallel_iterations=len(stages) + 1,
    )
    with tf.device(last):
        joined = [batch.joined(row.concat(), iterations) for row in rows]
    return Forward(masked(tf.nest.pack_sequence_as(specs, joined)), tf.add_n(penalties))


def _program(
    stage: Stage, inputs: WithMasks
) -> tuple[Callable[[WithMasks], tuple[WithMasks, tf.Tensor]], WithMasks]:
    """Returns the forward pass of one micro-batch in a stage, and the specs of its outputs.

    The pass is a function from inputs, whose specs are given, to outputs and the penalty, float32.
    """
    traced: dict[str, Any] = {}

    def forward(*flat: tf.Tensor) -> None:
        given = tf.nest.pack_sequence_as(inputs, flat)
        outputs = with_masks(stage(masked(given), training=False))
        traced.update(fed=list(flat), outputs=outputs, penalty=sum_of(stage.losses))

    function = tf.function(forward).get_concrete_function(*tf.nest.flatten(inputs))
    cut_out = subgraph(
        function,
        traced["fed"],
        [*tf.nest.flatten(traced["outputs"]), traced["penalty"]],
        effects=function.graph.control_outputs,
        values=read_variables(function),
    )
    specs = tf.nest.map_structure(spec_of, traced["outputs"])

    def run(values: WithMasks) -> tuple[WithMasks, tf.Tensor]:
        *outputs, penalty = cut_out(*tf.nest.flatten(values))
        return tf.nest.pack_sequence_as(specs, outputs), penalty

    return run, specs
