"""What the blocks of a pipeline cost, and how long its stages take for a batch.

A task is ``(stage, micro-batch, whether it goes back)``, and an order of tasks a list in which each
comes after those whose results it needs: what the functions of ``pipeline_parallel.orders`` return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Order = Sequence["tuple[int, int, bool]"]


class BlockCost(NamedTuple):
    """What a block, or several together, cost for one micro-batch.

    Attributes:
      name: of the block, or of the first and the last.
      forward: the forward pass, in FLOPs or seconds.
      backward: the backward pass from kept activations, in the same.
      parameters: how many are trained.
      parameter_bytes: of these.
      other_bytes: of weights that are not trained, as the moving averages of batch norm.
      input_bytes: what the block before returns.
      needed_input_bytes: of these, what the backward pass needs.
      output_bytes: what the block returns.
      needed_output_bytes: of these, what its own backward pass needs.
      activation_bytes: all that its backward pass needs of the forward pass but the inputs.
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
        """Both passes."""
        return self.forward + self.backward

    def followed_by(self, other: BlockCost) -> BlockCost:
        """Returns the costs of both in one stage."""
        # What both need of the tensors between is kept once.
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
    """A time in which a device works.

    Attributes:
      stage: whose device.
      micro_batch: its number.
      kind: ``forward``, ``recompute``, which is the forward pass once more, or ``backward``.
      begin: seconds from the start of the batch, or whatever costs are in.
      end: the same.
    """

    stage: int
    micro_batch: int
    kind: str
    begin: float
    end: float


class Simulation(NamedTuple):
    """When the stages of a pipeline work on a batch.

    Attributes:
      stages: how many there are.
      intervals: of all devices.
    """

    stages: int
    intervals: list[Interval]

    @property
    def seconds(self) -> float:
        """The time of a batch, without the update of the weights."""
        return max(own.end for own in self.intervals)

    @property
    def busy(self) -> list[float]:
        """The fraction of the time in which each device works."""
        return [self._work(stage=stage) / self.seconds for stage in range(self.stages)]

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they have nothing to do."""
        return 1 - sum(self.busy) / self.stages

    @property
    def recomputed(self) -> float:
        """The fraction of forward passes that are made once more in the devices' work."""
        return self._work(kind="recompute") / self._work()

    def _work(self, stage: int | None = None, kind: str | None = None) -> float:
        return sum(
            own.end - own.begin
            for own in self.intervals
            if stage in (None, own.stage) and kind in (None, own.kind)
        )


def simulate(
    order: Order,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    transfer: Sequence[float] | None = None,
    rematerialize: str = "except_last",
) -> Simulation:
    """Returns when each stage works on each micro-batch.

    Each device makes its tasks in their order, as soon as it is free and has what they need.

    Without kept activations, a task that goes back makes its forward pass once more, when the
    gradient has come. The last stage, which goes back at once, then makes it there only.

    Args:
      order: of the tasks of all stages.
      forward: seconds of each stage for a micro-batch.
      backward: the same, from kept activations.
      transfer: seconds that outputs, or their gradients, are on the way from each stage but the
        last to the next, or back; no device waits for that. None: none.
      rematerialize: whose activations are not kept: ``always``, ``except_last`` or ``never``.
    """
    last = len(forward) - 1
    transfer = transfer or [0.0] * last
    count = _micro_batches(order)
    free = [0.0] * len(forward)
    done: dict[tuple[int, int, bool], float] = {}
    intervals: list[Interval] = []
    for stage, number, goes_back in order:
        kept = keeps_activations(rematerialize, number, count)
        parts = [("backward", backward[stage])] if goes_back else []
        if not goes_back and (kept or stage < last):
            parts = [("forward", forward[stage])]
        elif goes_back and not kept:
            parts.insert(0, ("recompute" if stage < last else "forward", forward[stage]))
        if not parts:
            continue
        time = free[stage]
        if goes_back and stage < last:
            time = max(time, done[stage + 1, number, True] + transfer[stage])
        elif stage and parts[0][0] == "forward":
            time = max(time, done[stage - 1, number, False] + transfer[stage - 1])
        for kind, seconds in parts:
            intervals.append(Interval(stage, number, kind, time, time + seconds))
            time += seconds
        free[stage] = done[stage, number, goes_back] = time
    return Simulation(len(forward), intervals)


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """Returns the bubble of equal stages that compute nothing twice (Huang et al. 2018)."""
    return (stages - 1) / (micro_batches + stages - 1)


class Held(NamedTuple):
    """Of how many micro-batches a stage holds something at a time, at most.

    Attributes:
      inputs: what the stage before sent, until the backward pass is done.
      activations: what a backward pass needs besides.
    """

    inputs: int
    activations: int


def held(order: Order, rematerialize: str) -> list[Held]:
    """Returns what each stage holds.

    A stage has the inputs of the micro-batches that it has begun, and of those that the stage
    before has sent ahead.

    Args:
      order: of the tasks of all stages.
      rematerialize: whose activations are not kept: ``always``, ``except_last`` or ``never``.
    """
    count = _micro_batches(order)
    begun: list[int] = []
    activations: list[int] = []
    for place in range(1 + max(stage for stage, _, _ in order)):
        under_way = kept = most = most_kept = 0
        for stage, number, goes_back in order:
            if stage != place:
                continue
            keeps = keeps_activations(rematerialize, number, count)
            if goes_back:
                most_kept = max(most_kept, kept + (not keeps))
                under_way -= 1
                kept -= keeps
            else:
                under_way += 1
                kept += keeps
                most, most_kept = max(most, under_way), max(most_kept, kept)
        begun.append(most)
        activations.append(most_kept)
    return [Held(*own) for own in zip([begun[0], *begun], activations)]


class StageMemory(NamedTuple):
    """The bytes that a stage needs on its device.

    Not counted are gradients of activations, and what operations need while they run.

    Attributes:
      weights: trained and not.
      gradients: sums over the micro-batches.
      slots: what the optimizer keeps of each trained weight.
      inputs: of the micro-batches that are under way.
      activations: kept, or computed once more.
    """

    weights: float
    gradients: float
    slots: float
    inputs: float
    activations: float

    @property
    def total(self) -> float:
        """All together."""
        return sum(self)


def stage_memory(cost: BlockCost, held: Held, slots: float) -> StageMemory:
    """Returns what a stage needs.

    Args:
      cost: of its blocks together.
      held: by it.
      slots: values that the optimizer keeps of each trained weight, in the same dtype.
    """
    return StageMemory(
        weights=cost.parameter_bytes + cost.other_bytes,
        gradients=cost.parameter_bytes,
        slots=slots * cost.parameter_bytes,
        inputs=held.inputs * cost.input_bytes,
        activations=held.activations * cost.activation_bytes,
    )


def keeps_activations(rematerialize: str, number: int, count: int) -> bool:
    """Whether the activations of a micro-batch are kept for its backward pass.

    Args:
      rematerialize: whose are not: ``always``, ``except_last`` or ``never``.
      number: of the micro-batch.
      count: how many there are.
    """
    return rematerialize == "never" or (rematerialize == "except_last" and number == count - 1)


def _micro_batches(order: Order) -> int:
    return 1 + max(number for _, number, _ in order)
