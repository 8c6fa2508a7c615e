"""The passes of micro-batches through the stages of a pipeline, and their totals.

A device runs its passes in the order in which they are added to the graph here. Different devices
run theirs at the same time, as far as the data allow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow import TensorArray as Row  # one tensor for each micro-batch

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches, check_outputs
from imagenet_fast.pipeline_parallel.programs import Loss, Programs, Tensors, Totals, floats_of
from imagenet_fast.pipeline_parallel.schedules import tasks
from imagenet_fast.pipeline_parallel.simulation import keeps_activations
from imagenet_fast.pipeline_parallel.stage import Stage, masked


class State(NamedTuple):
    """The progress of a stage.

    Attributes:
      done: a tensor that the next pass on its device waits for.
      totals: of the passes so far.
    """

    done: tf.Tensor
    totals: Totals


class Kept(NamedTuple):
    """What a stage stores of a micro-batch between its forward and backward passes.

    Attributes:
      inputs: of the stage, on its device, ``WithMasks``.
      activations: None: the backward pass recomputes them.
    """

    inputs: Any
    activations: Tensors | None = None


@dataclasses.dataclass(eq=False)
class Passes:
    """The passes of one batch.

    Attributes:
      stages: of the pipeline.
      programs: of each stage.
      devices: number of devices; stage k is on device k % ``devices``.
      batch: in micro-batches.
      loss: of the whole batch, from all outputs and targets; None: the last stage computes it for
        each micro-batch.
      targets: of the whole batch.
      scale: factor of regularization, as of the loss.
      rematerialize: ``always``, ``except_last`` or ``never``.
      last: index of the last stage.
      outputs: of the whole batch, ``WithMasks``, after ``finish_forward``.
      reached: whether the loss of the whole batch depends on each of the floating-point outputs,
        after ``finish_forward``; empty without such a loss.
      state: of each stage.
    """

    stages: Sequence[Stage]
    programs: Sequence[Programs]
    devices: int
    batch: MicroBatches
    loss: Loss | None
    targets: Any
    scale: Any
    rematerialize: str

    def __post_init__(self) -> None:
        self.last = len(self.stages) - 1
        self.outputs: Any = None
        self.reached: list[bool] = []
        self._upstream: Tensors = []
        self.state: list[State] = []
        for stage, own in zip(self.stages, self.programs):
            with tf.device(stage.device):
                self.state.append(State(tf.constant(0), own.zeros()))

    def keeps(self, stage: int, number: int) -> bool:
        """Whether a stage stores the activations of a micro-batch.

        The last stage runs the backward pass of the last micro-batch right after its forward pass.
        """
        count = self.batch.count
        at_once = self.loss is not None and stage == self.last and number == count - 1
        return at_once or keeps_activations(self.rematerialize, number, count)

    def forward(self, place: int, number: Any, inputs: Any, keep: bool) -> tuple[Kept, Any]:
        """Runs the forward pass of a micro-batch in the stage at ``place``.

        Returns:
          What its backward pass needs; the outputs.
        """
        done, totals = self.state[place]
        with tf.device(self.stages[place].device):
            inputs = _after([done], inputs)
            outputs, activations, totals = self.programs[place].forward(
                *self._of(number), inputs, self._targets(place, number), totals, keep
            )
            self._finish(place, tf.nest.flatten(outputs), totals)
        return Kept(inputs, activations), outputs

    def backward(
        self, place: int, number: Any, kept: Kept, upstream: Tensors
    ) -> tuple[Any, Tensors]:
        """Runs the backward pass of a micro-batch in the stage at ``place``.

        ``kept`` is of its forward pass or, for a last stage with a loss, its inputs; ``upstream``
        are the gradients that the next stage returned.

        Returns:
          The outputs, if they were computed here; the gradients of the inputs.
        """
        done, totals = self.state[place]
        with tf.device(self.stages[place].device):
            upstream = _after([done], upstream)
            inputs, activations = kept
            if activations is None:
                # The inputs wait for the gradient. Otherwise TensorFlow would recompute the forward
                # pass too early, or merge it with the first one.
                inputs = _after([done, *upstream], inputs)
            outputs, back, totals = self.programs[place].backward(
                *self._of(number),
                inputs,
                self._targets(place, number),
                upstream,
                activations,
                totals,
            )
            self._finish(place, back or totals.gradients, totals)
        return outputs, back

    def inputs(self, number: Any) -> Any:
        """Returns the inputs of a micro-batch, ``WithMasks``, on the first stage's device."""
        with tf.device(self.stages[0].device):
            return self.batch.inputs(number)

    def finish_forward(self, outputs: Sequence[Any]) -> None:
        """Joins the outputs of micro-batches, in their order, and computes a loss of the batch."""
        done, totals = self.state[self.last]
        check_outputs(outputs[0])
        with tf.device(self.stages[self.last].device):
            rows = tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)
            self.outputs = tf.nest.map_structure(self.batch.joined, rows)
            if self.loss is None:
                return
            floats = floats_of(self.outputs)
            with tf.GradientTape() as tape:
                tape.watch(floats)
                loss = self.loss(masked(self.outputs), self.targets)
            variables = tape.watched_variables()
            gradients, direct = tape.gradient(loss, [floats, variables])
            check_loss(
                [value for value, gradient in zip(variables, direct) if gradient is not None],
                self.stages,
            )
            self.reached = [gradient is not None for gradient in gradients]
            self._upstream = [
                tf.zeros_like(value) if gradient is None else gradient
                for value, gradient in zip(floats, gradients)
            ]
            total = totals.loss + tf.cast(loss, tf.float32)
            self.state[self.last] = State(done, totals._replace(loss=total))

    def upstream(self, number: Any) -> Tensors:
        """Returns the gradients of a micro-batch's outputs for a loss of the whole batch."""
        if self.loss is None:
            return []
        with tf.device(self.stages[self.last].device):
            return [self.batch.gradient(whole, number) for whole in self._upstream]

    def _of(self, number: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the index, int32, and the scaled fraction, float32, of a micro-batch."""
        fraction = self.batch.fraction(number) * self.scale
        # Not constants: TensorFlow would specialize the function for each value.
        return (
            tf.raw_ops.PlaceholderWithDefault(input=tf.convert_to_tensor(number), shape=[]),
            tf.raw_ops.PlaceholderWithDefault(
                input=tf.convert_to_tensor(fraction, tf.float32), shape=[]
            ),
        )

    def _targets(self, place: int, number: Any) -> Any:
        return self.batch.targets(number) if place == self.last and self.loss is None else ()

    def _finish(self, place: int, results: Tensors, totals: Totals) -> None:
        with tf.control_dependencies(results):
            done = tf.constant(0)
        self.state[place] = State(done, totals)
        for other in range(place % self.devices, len(self.stages), self.devices):
            self.state[other] = self.state[other]._replace(done=done)


def check_loss(variables: Sequence[tf.Variable], stages: Sequence[Stage]) -> None:
    """Checks that a loss depends on the weights by the outputs only.

    Raises:
      UserError: if a stage trains one of the variables for which it has gradients of its own.
    """
    trained = {own.value.ref(): own.path for stage in stages for own in stage.variables}
    for variable in variables:
        path = trained.get(variable.ref())
        if path is not None:
            raise UserError(
                f"the loss reads the weight {path}, and a pipeline computes its gradient by the "
                "outputs only: give the layer a regularizer, or call add_loss in its call"
            )


def _after(waits: Tensors, values: Any) -> Any:
    """Returns the values on the device in scope, once ``waits`` are computed."""
    with tf.control_dependencies(waits):
        return tf.nest.map_structure(tf.identity, values)


def unrolled(passes: Passes, schedule: str) -> None:
    """Runs all passes in any schedule, each as a node of the graph; ``passes`` has the results."""
    count, last = passes.batch.count, passes.last
    kept: dict[tuple[int, int], Kept] = {}
    # By micro-batch: outputs of the stage before, gradients from the stage after.
    outputs: dict[int, Any] = {}
    upstream: dict[int, Tensors] = {}
    for place, number, backward in tasks(schedule, last + 1, count, passes.devices):
        if not backward:
            inputs = outputs.pop(number) if place else passes.inputs(number)
            keep = passes.keeps(place, number)
            if keep or place < last or passes.loss is not None:
                kept[place, number], outputs[number] = passes.forward(place, number, inputs, keep)
            else:  # its backward pass follows at once, and computes the outputs
                kept[place, number] = Kept(inputs)
            continue
        if place == last:
            if passes.loss is not None and passes.outputs is None:
                passes.finish_forward([outputs[other] for other in range(count)])
            upstream[number] = passes.upstream(number)
        computed, upstream[number] = passes.backward(
            place, number, kept.pop((place, number)), upstream[number]
        )
        if computed is not None:
            outputs[number] = computed
    if passes.outputs is None:
        passes.finish_forward([outputs[number] for number in range(count)])


def looped(passes: Passes, keep: bool) -> None:
    """Runs all passes in two ``tf.while_loop``s, one forward and one backward, as ``gpipe``.

    The graph does not grow with the micro-batches. Unless the activations of all micro-batches are
    stored (``keep``), the last one passes outside the loops, so that its activations can be stored.
    ``passes``, with a loss of the whole batch, has the results.
    """
    count = passes.batch.count if keep else passes.batch.count - 1
    loops = _Loops(passes, count, keep)
    loops.forward()
    outputs, kept = [loops.outputs()], []
    if not keep:
        outputs.append(passes.inputs(count))
        for place in range(passes.last + 1):
            stored, outputs[-1] = passes.forward(
                place, count, outputs[-1], passes.keeps(place, count)
            )
            kept.append(stored)
    passes.finish_forward(outputs)
    if not keep:
        upstream = passes.upstream(count)
        for place in reversed(range(passes.last + 1)):
            _, upstream = passes.backward(place, count, kept[place], upstream)
    loops.backward()


class _Loops:
    """The forward loop, the backward loop, and what is stored between them."""

    def __init__(self, passes: Passes, count: int, keep: bool) -> None:
        self._passes, self._count, self._keep = passes, count, keep
        # What a stage stores: its inputs, unless they are the batch's, and activations.
        self._kept: list[list[Row]] = []
        inputs: Any = ()
        for place, programs in enumerate(passes.programs):
            specs = [*tf.nest.flatten(inputs), *(programs.activations if keep else ())]
            self._kept.append(self._rows(place, specs))
            inputs = programs.outputs
        self._outputs = self._rows(passes.last, tf.nest.flatten(inputs))

    def forward(self) -> None:
        """Runs the forward passes, first micro-batch first."""

        def body(
            number: tf.Tensor,
            state: list[State],
            kept: list[list[Row]],
            made: list[Row],
        ) -> Any:
            self._passes.state = state
            outputs = self._passes.inputs(number)
            for place, rows in enumerate(kept):
                stored, outputs = self._passes.forward(place, number, outputs, self._keep)
                values = [
                    *(tf.nest.flatten(stored.inputs) if place else ()),
                    *(stored.activations or ()),
                ]
                kept[place] = self._write(place, number, rows, values)
            made = self._write(self._passes.last, number, made, tf.nest.flatten(outputs))
            return number + 1, self._passes.state, kept, made

        _, self._passes.state, self._kept, self._outputs = self._loop(
            lambda number, *_: number < self._count,
            body,
            [tf.constant(0), self._passes.state, self._kept, self._outputs],
        )

    def backward(self) -> None:
        """Runs the backward passes, last micro-batch first."""

        def body(number: tf.Tensor, state: list[State]) -> Any:
            self._passes.state = state
            upstream: Tensors = self._passes.upstream(number)
            for place in reversed(range(len(self._kept))):
                _, upstream = self._passes.backward(
                    place, number, self._read(place, number), upstream
                )
            return number - 1, self._passes.state

        _, self._passes.state = self._loop(
            lambda number, *_: number >= 0,
            body,
            [tf.constant(self._count - 1), self._passes.state],
        )

    def outputs(self) -> Any:
        """Returns the outputs of the last stage for all micro-batches in the loop."""
        with tf.device(self._passes.stages[-1].device):
            joined = [row.concat() for row in self._outputs]
        return tf.nest.pack_sequence_as(self._passes.programs[-1].outputs, joined)

    def _loop(self, condition: Any, body: Any, begin: list[Any]) -> Any:
        # Enough iterations at a time to occupy all stages.
        return tf.while_loop(condition, body, begin, parallel_iterations=len(self._kept) + 1)

    def _rows(self, place: int, specs: Sequence[tf.TensorSpec]) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [
                tf.TensorArray(spec.dtype, self._count, element_shape=spec.shape, infer_shape=False)
                for spec in specs
            ]

    def _write(self, place: int, number: tf.Tensor, rows: list[Row], values: Tensors) -> list[Row]:
        with tf.device(self._passes.stages[place].device):
            return [row.write(number, tf.identity(value)) for row, value in zip(rows, values)]

    def _read(self, place: int, number: tf.Tensor) -> Kept:
        with tf.device(self._passes.stages[place].device):
            values = [row.read(number) for row in self._kept[place]]
        if not place:
            return Kept(self._passes.inputs(number), values if self._keep else None)
        inputs = self._passes.programs[place - 1].outputs
        count = len(tf.nest.flatten(inputs))
        return Kept(
            tf.nest.pack_sequence_as(inputs, values[:count]),
            values[count:] if self._keep else None,
        )
