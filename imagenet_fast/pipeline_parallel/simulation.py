"""The time and memory that a pipeline's stages need for a batch, from the cost of its blocks.

The ``order`` of a schedule is a list of tasks in which each task follows those that it depends on,
as :func:`~imagenet_fast.pipeline_parallel.schedules.tasks` returns it. ``rematerialize`` says of
which micro-batches activations are recomputed: ``always`` all, ``except_last`` all but the last,
``never`` none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from imagenet_fast.pipeline_parallel.schedules import Task

Order = Sequence[Task]


class BlockCost(NamedTuple):
    """The cost of one block, or of several consecutive ones, for one micro-batch.

    Attributes:
      name: of the block, or of the first and the last one.
      forward: of the forward pass, in FLOPs or seconds.
      backward: of the backward pass from kept activations, in the same unit.
      parameters: trainable ones.
      parameter_bytes: of trainable parameters.
      other_bytes: of weights that are not trained, such as batch norm's moving averages.
      input_bytes: of the inputs.
      needed_input_bytes: of the inputs that the backward pass needs.
      output_bytes: of the outputs.
      needed_output_bytes: of the outputs that the block's own backward pass needs.
      activation_bytes: of all activations but the inputs that the backward pass needs.
    """

    name: str
    forward: float
    backward: float
    parameters: int
    parameter_bytes: int
    other_bytes: int
    input_bytes: int
    needed_input_bytes: int
    output_bytes: int
    needed_output_bytes: int
    activation_bytes: int

    @property
    def work(self) -> float:
        """The cost of both passes."""
        return self.forward + self.backward

    def followed_by(self, other: BlockCost) -> BlockCost:
        """Returns the cost of both in one stage."""
        # Tensors between them that both backward passes need are kept once.
        between = max(0, other.needed_input_bytes - self.needed_output_bytes)
        return BlockCost(
            name=f"{self.name.partition(' .. ')[0]} .. {other.name.rpartition(' .. ')[2]}",
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            parameters=self.parameters + other.parameters,
            parameter_bytes=self.parameter_bytes + other.parameter_bytes,
            other_bytes=self.other_bytes + other.other_bytes,
            input_bytes=self.input_bytes,
            needed_input_bytes=self.needed_input_bytes,
            output_bytes=other.output_bytes,
            needed_output_bytes=other.needed_output_bytes,
            activation_bytes=self.activation_bytes + between + other.activation_bytes,
        )


class Interval(NamedTuple):
    """A time interval in which a stage's device works.

    Attributes:
      stage: its number.
      micro_batch: its number.
      kind: ``forward``, ``recompute`` (the forward pass again), ``backward``, or ``weights``
        (weight gradients that ``backward`` leaves out).
      begin: time after the start of the batch, in seconds or in the costs' unit.
      end: likewise.
    """

    stage: int
    micro_batch: int
    kind: str
    begin: float
    end: float


class Simulation(NamedTuple):
    """A simulated batch of a pipeline.

    Attributes:
      devices: their number; stage k is on device k % ``devices``.
      intervals: of all stages.
    """

    devices: int
    intervals: list[Interval]

    @property
    def seconds(self) -> float:
        """The duration of the batch, without the weight update."""
        return max(interval.end for interval in self.intervals)

    @property
    def busy(self) -> list[float]:
        """The fraction of the time in which each device works."""
        return [self._work(device=device) / self.seconds for device in range(self.devices)]

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they are idle."""
        return 1 - sum(self.busy) / self.devices

    @property
    def recomputed(self) -> float:
        """The fraction of the devices' work that is recomputation."""
        return self._work(kind="recompute") / self._work()

    def _work(self, device: int | None = None, kind: str | None = None) -> float:
        return sum(
            interval.end - interval.begin
            for interval in self.intervals
            if device in (None, interval.stage % self.devices) and kind in (None, interval.kind)
        )


def simulate(
    order: Order,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    transfer: Sequence[float] | None = None,
    rematerialize: str = "except_last",
    devices: int | None = None,
) -> Simulation:
    """Simulates when each stage works on each micro-batch.

    Each device runs its tasks in order, as soon as it is free and the task's inputs have arrived. A
    backward task recomputes activations when its gradient has arrived.

    Args:
      order: the schedule.
      forward: seconds of each stage for a micro-batch.
      backward: seconds of each stage for a micro-batch, from kept activations.
      transfer: seconds to send outputs from each stage but the last to the next, or gradients back;
        devices do not wait meanwhile. None: no time.
      rematerialize: see this module.
      devices: their number; stage k is on device k % ``devices``. None: one for each stage.
    """
    last = len(forward) - 1
    devices = devices or len(forward)
    transfer = transfer or [0.0] * last
    free = [0.0] * devices
    done: dict[tuple[int, int, bool], float] = {}
    intervals: list[Interval] = []
    for (stage, number, is_backward), kinds in zip(order, passes(order, rematerialize)):
        if not kinds:
            continue
        time = free[stage % devices]
        if is_backward and stage < last:
            time = max(time, done[stage + 1, number, True] + transfer[stage])
        elif stage and kinds[0] == "forward":
            time = max(time, done[stage - 1, number, False] + transfer[stage - 1])
        for kind in kinds:
            end = time + (backward if kind == "backward" else forward)[stage]
            intervals.append(Interval(stage, number, kind, time, end))
            time = end
        free[stage % devices] = done[stage, number, is_backward] = time
    return Simulation(devices, intervals)


def passes(order: Order, rematerialize: str) -> list[tuple[str, ...]]:
    """Returns the kinds of passes that each task runs, in order, as in :class:`Interval`.

    If activations are not stored, a backward task recomputes them first. In the last stage, a
    forward pass that the backward pass follows at once is a part of the backward task, and nothing
    is recomputed.
    """
    last = max(stage for stage, _, _ in order)
    count = _micro_batches(order)
    row = [(number, is_backward) for stage, number, is_backward in order if stage == last]
    at_once = {
        number
        for (number, is_backward), following in zip(row, row[1:])
        if not is_backward and following == (number, True)
    }

    def kinds(stage: int, number: int, is_backward: bool) -> tuple[str, ...]:
        stored = keeps_activations(rematerialize, number, count)
        merged = not stored and stage == last and number in at_once
        if not is_backward:
            return () if merged else ("forward",)
        if stored:
            return ("backward",)
        return ("forward" if merged else "recompute", "backward")

    return [kinds(*task) for task in order]


def passes_of_stages(order: Order, rematerialize: str) -> list[tuple[int, int]]:
    """Returns the forward passes, with recomputed ones, and the backward passes of each stage."""
    counts = [[0, 0] for _ in range(1 + max(stage for stage, _, _ in order))]
    for (stage, _, _), kinds in zip(order, passes(order, rematerialize)):
        for kind in kinds:
            counts[stage][kind == "backward"] += 1
    return [(forward, backward) for forward, backward in counts]


class MicroBatchesInMemory(NamedTuple):
    """The largest number of micro-batches in a stage's memory at a time.

    Attributes:
      inputs: micro-batches whose inputs are kept until their backward pass.
      activations: micro-batches whose other activations are kept or recomputed.
    """

    inputs: int
    activations: int


def micro_batches_in_memory(order: Order, rematerialize: str) -> list[MicroBatchesInMemory]:
    """Returns the micro-batches that each stage keeps in memory.

    A stage keeps the inputs of micro-batches that it has begun, and of those that the stage before
    has already sent.
    """
    count = _micro_batches(order)
    inputs: list[int] = []
    activations: list[int] = []
    for place in range(1 + max(stage for stage, _, _ in order)):
        in_flight = kept = most = most_kept = 0
        for stage, number, is_backward in order:
            if stage != place:
                continue
            keeps = keeps_activations(rematerialize, number, count)
            if is_backward:
                most_kept = max(most_kept, kept + (not keeps))
                in_flight -= 1
                kept -= keeps
            else:
                in_flight += 1
                kept += keeps
                most, most_kept = max(most, in_flight), max(most_kept, kept)
        inputs.append(most)
        activations.append(most_kept)
    return [MicroBatchesInMemory(*pair) for pair in zip([inputs[0], *inputs], activations)]


class StageMemory(NamedTuple):
    """The bytes that a stage needs on its device.

    Gradients of activations and the operations' workspace are not included.

    Attributes:
      weights: trainable or not.
      gradients: accumulated over the micro-batches.
      slots: of the optimizer.
      inputs: of the micro-batches in flight.
      activations: kept or recomputed.
    """

    weights: float
    gradients: float
    slots: float
    inputs: float
    activations: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def stage_memory(cost: BlockCost, micro_batches: MicroBatchesInMemory, slots: float) -> StageMemory:
    """Returns the memory of a stage whose blocks together have a cost.

    There are ``slots`` optimizer slots per trainable value, in the same dtype.
    """
    return StageMemory(
        weights=cost.parameter_bytes + cost.other_bytes,
        gradients=cost.parameter_bytes,
        slots=slots * cost.parameter_bytes,
        inputs=micro_batches.inputs * cost.input_bytes,
        activations=micro_batches.activations * cost.activation_bytes,
    )


def keeps_activations(rematerialize: str, number: int, count: int) -> bool:
    """Whether the activations of micro-batch ``number`` of ``count`` are kept."""
    return rematerialize == "never" or (rematerialize == "except_last" and number == count - 1)


def _micro_batches(order: Order) -> int:
    return 1 + max(number for _, number, _ in order)
