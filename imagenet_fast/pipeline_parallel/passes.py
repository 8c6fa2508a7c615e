"""The passes of micro-batches through the stages of a pipeline, and what they add up to.

A device makes its passes in the order in which they are asked for here; different devices make
theirs at the same time, as far as their data allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches
from imagenet_fast.pipeline_parallel.programs import Programs, Sums, Tensors
from imagenet_fast.pipeline_parallel.stage import Stage


class State(NamedTuple):
    """How far a stage is.

    Attributes:
      done: what its next pass waits for.
      sums: of the passes so far.
    """

    done: tf.Tensor
    sums: Sums


class Kept(NamedTuple):
    """What a stage keeps of a micro-batch, from its forward pass to its backward pass.

    Attributes:
      inputs: of the stage, on its device.
      activations: None: they are computed again.
    """

    inputs: Any
    activations: Tensors | None = None


class Passes:
    """The passes of one batch, which add up their results.

    Args:
      stages: of the pipeline.
      programs: of each stage.
      batch: in its parts.
      scale: by which regularization is multiplied, as the loss is.

    Attributes:
      stages: the same.
      programs: the same.
      batch: the same.
      last: the place of the last stage.
      state: of each stage, what its next pass waits for, and the sums so far.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        programs: Sequence[Programs],
        batch: MicroBatches,
        scale: Any,
    ) -> None:
        self.stages = stages
        self.programs = programs
        self.batch = batch
        self.last = len(stages) - 1
        self._scale = scale
        self.state: list[State] = []
        for stage, own in zip(stages, programs):
            with tf.device(stage.device):
                self.state.append(State(tf.constant(0), own.zeros()))

    def forward(self, place: int, number: Any, inputs: Any, keep: bool) -> tuple[Kept, Any]:
        """Takes a micro-batch through a stage.

        Args:
          place: of the stage.
          number: of the micro-batch.
          inputs: of the stage.
          keep: whether to keep activations.

        Returns:
          What its backward pass needs; the outputs.
        """
        done, sums = self.state[place]
        with tf.device(self.stages[place].device):
            inputs = _after([done], inputs)
            outputs, activations, sums = self.programs[place].forward(
                *self._of(number), inputs, self._targets(place, number), sums, keep
            )
            self._finish(place, tf.nest.flatten(outputs), sums)
        return Kept(inputs, activations), outputs

    def backward(
        self, place: int, number: Any, kept: Kept, upstream: Tensors
    ) -> tuple[Any, Tensors]:
        """Takes a micro-batch back through a stage.

        Args:
          place: of the stage.
          number: of the micro-batch.
          kept: of its forward pass; of the last stage, its inputs do without that.
          upstream: the gradients that the stage after it returned.

        Returns:
          The outputs, if they had to be computed; the gradients of the inputs.
        """
        done, sums = self.state[place]
        with tf.device(self.stages[place].device):
            upstream = _after([done], upstream)
            inputs, activations = kept
            if activations is None:
                # The inputs wait for the gradient: else the forward pass would be computed again
                # too early, or merged with the first one by TensorFlow.
                inputs = _after([done, *upstream], inputs)
            aims = self._targets(place, number)
            outputs, back, sums = self.programs[place].backward(
                *self._of(number), inputs, aims, upstream, activations, sums
            )
            self._finish(place, back or sums.gradients, sums)
        return outputs, back

    def inputs(self, number: Any) -> Any:
        """Returns a micro-batch on the first stage's device."""
        with tf.device(self.stages[0].device):
            return self.batch.inputs(number)

    def _of(self, number: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a micro-batch's number, int32, and share of the batch, float32."""
        share = self.batch.share(number) * self._scale
        # No constants: TensorFlow would make a program of its own for each of them.
        return (
            tf.raw_ops.PlaceholderWithDefault(input=tf.convert_to_tensor(number), shape=[]),
            tf.raw_ops.PlaceholderWithDefault(
                input=tf.convert_to_tensor(share, tf.float32), shape=[]
            ),
        )

    def _targets(self, place: int, number: Any) -> Any:
        return self.batch.targets(number) if place == self.last else ()

    def _finish(self, place: int, results: Tensors, sums: Sums) -> None:
        with tf.control_dependencies(results):
            self.state[place] = State(tf.constant(0), sums)


def _after(waits: Tensors, values: Any) -> Any:
    """Returns the values on the device in scope, once something else is done."""
    with tf.control_dependencies(waits):
        return tf.nest.map_structure(tf.identity, values)
