"""Estimates of a pipeline: its stages, their memory and its schedule."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base import environment
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config, option_names
from imagenet_fast.data.info import read_info
from imagenet_fast.lab.planning.cost_model.pipeline import ideal_bubble
from imagenet_fast.lab.planning.gantt import gantt
from imagenet_fast.lab.planning.step_costs import slots_of
from imagenet_fast.models import network_of
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.options import MODEL_NAMES
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.pipeline_parallel.balance import best_balance
from imagenet_fast.pipeline_parallel.gpipe import default_devices
from imagenet_fast.pipeline_parallel.partition import bounds
from imagenet_fast.pipeline_parallel.profile import estimate, measure
from imagenet_fast.pipeline_parallel.schedules import Task, tasks
from imagenet_fast.pipeline_parallel.simulation import (
    BlockCost,
    Simulation,
    StageMemory,
    micro_batches_in_memory,
    simulate,
    stage_memory,
)
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.network import check_pipeline

_GIB = 2**30
# The options in a plan's file besides the network's.
_OPTIONS = (
    *("batch_size", "accumulation_steps", "image_size", "precision"),
    *("optimizer", "pipeline_schedule", "pipeline_stages_per_device", "rematerialize"),
)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A network's partition into pipeline stages.

    Attributes:
      config: the run's options.
      costs: of the blocks, for a micro-batch.
      device: on which they were measured; empty: they are counted in FLOPs.
      balance: number of blocks in each stage.
      slots: optimizer slots and weight averages per trainable value.
      limit: bytes of each device.
    """

    config: Config
    costs: tuple[BlockCost, ...]
    device: str
    balance: tuple[int, ...]
    slots: float
    limit: float = math.inf

    @functools.cached_property
    def stages(self) -> list[BlockCost]:
        """The costs of each stage."""
        parts = bounds(self.balance, len(self.costs), len(self.balance))
        return [functools.reduce(BlockCost.followed_by, self.costs[i:j]) for i, j in parts]

    @functools.cached_property
    def memory(self) -> list[StageMemory]:
        """The memory of each stage."""
        counts = micro_batches_in_memory(self._order, self.config.rematerialize)
        return [stage_memory(*pair, self.slots) for pair in zip(self.stages, counts)]

    @property
    def device_memory(self) -> list[float]:
        """The bytes that each device needs."""
        return [
            sum(memory.total for memory in self.memory[device :: self._devices])
            for device in range(self._devices)
        ]

    @functools.cached_property
    def simulation(self) -> Simulation:
        """The schedule of a batch."""
        return simulate(
            self._order,
            [cost.forward for cost in self.stages],
            [cost.backward for cost in self.stages],
            rematerialize=self.config.rematerialize,
            devices=self._devices,
        )

    @property
    def speed_up(self) -> float:
        """The time of one such device that stores all activations, divided by the pipeline's."""
        return self._alone / self.simulation.seconds

    def table(self) -> str:
        """Returns the plan as text."""
        config, busy = self.config, self.simulation.busy
        work = sum(cost.work for cost in self.costs)
        images, parts = config.batch_size, config.accumulation_steps
        unit = "stage" if len(busy) == len(self.stages) else "device"
        slots = f"{self.slots:.3g} value{'s' * (self.slots != 1)}"
        lines = [
            f"network     {self._network()}: {len(self.costs)} blocks, "
            f"{sum(cost.parameters for cost in self.costs):,} parameters",
            f"batch       {images:,} images of {config.image_size} px in {parts:,} micro-batches "
            f"of {images // parts:,}",
            f"optimizer   {config.optimizer}, {slots} kept per weight",
            f"schedule    {config.pipeline_schedule}, rematerialize={config.rematerialize}",
            f"costs       {self._costs(work * parts / images)}",
            "",
            *self._stage_lines(),
            "",
            f"balance     --pipeline_balance={option_text(self.balance)}",
            f"busiest     {unit} {busy.index(max(busy))}, {max(busy):.1%} of the time; least busy: "
            f"{unit} {busy.index(min(busy))}, {min(busy):.1%}",
            f"bubble      {self.simulation.bubble:.1%} of the devices' time; "
            f"{self._ideal_bubble:.1%} with equal stages and no recomputation",
            f"recomputed  {self.simulation.recomputed:.1%} of the devices' work",
            f"time        {self._time()}; without communication",
            f"speed-up    {self.speed_up:.2f} over one device that stores all activations",
        ]
        if math.isfinite(self.limit):
            lines.append(f"memory      {self._fit()}")
        return "\n".join(lines)

    def files(self) -> dict[str, str]:
        """Returns the contents of the plan's files, by name."""
        return {
            "pipeline.csv": self.csv(),
            "pipeline.json": self.json(),
            "pipeline.svg": self.picture(),
        }

    def csv(self) -> str:
        """Returns a line for each block."""
        stages = [stage for stage, count in enumerate(self.balance) for _ in range(count)]
        rows: list[tuple] = [("stage", *BlockCost._fields)]
        rows += [(stage, *cost) for stage, cost in zip(stages, self.costs)]
        return "".join(",".join(map(str, row)) + "\n" for row in rows)

    def json(self) -> str:
        """Returns everything but the blocks as JSON."""
        values = {
            "network": self._network(),
            "blocks": len(self.costs),
            "parameters": sum(cost.parameters for cost in self.costs),
            "costs": f"seconds on {self.device}" if self.device else "FLOPs",
            "slots": self.slots,
            "balance": self.balance,
            "batch": self.simulation.seconds,
            "batch_on_one_device": self._alone,
            "bubble": self.simulation.bubble,
            "ideal_bubble": self._ideal_bubble,
            "recomputed": self.simulation.recomputed,
            "speed_up": self.speed_up,
            "stages": [
                {**cost._asdict(), "blocks": count, "memory": {**memory._asdict(), "total": total}}
                for cost, count, memory in zip(self.stages, self.balance, self.memory)
                for total in (memory.total,)
            ],
            "options": {name: getattr(self.config, name) for name in _OPTIONS},
            **environment.provenance(),
        }
        return json.dumps(values, indent=2) + "\n"

    def picture(self) -> str:
        """Returns a chart of the stages' schedule as SVG."""
        config = self.config
        title = (
            f"{self._network()}, batch {config.batch_size:,} in {config.accumulation_steps:,}, "
            f"{config.pipeline_schedule}, rematerialize={config.rematerialize}"
        )
        if self.device:
            return gantt(self.simulation, title, "seconds")
        return gantt(self.simulation, title, "time; one device would need 1", 1 / self._alone)

    @property
    def _alone(self) -> float:
        """The time of one device for a batch, if it stores all activations."""
        return self.config.accumulation_steps * sum(cost.work for cost in self.costs)

    def _time(self) -> str:
        """Returns the time of a batch, in seconds if the costs are."""
        seconds = self.simulation.seconds
        relative = f"{seconds / self._alone:.3f} of one device's"
        if self.device:
            return f"{seconds:.4g} s for a batch, {relative}"
        return f"{relative} for a batch"

    @property
    def _ideal_bubble(self) -> float:
        config = self.config
        return ideal_bubble(
            self._devices, config.accumulation_steps, config.pipeline_stages_per_device
        )

    @property
    def _devices(self) -> int:
        return max(1, len(self.balance) // self.config.pipeline_stages_per_device)

    @functools.cached_property
    def _order(self) -> list[Task]:
        config = self.config
        return tasks(
            config.pipeline_schedule, len(self.balance), config.accumulation_steps, self._devices
        )

    def _network(self) -> str:
        """Returns the network's name, and its options that differ from the defaults."""
        config, default = self.config, Config()
        names = models.option_names(config.model) if config.model in MODEL_NAMES else []
        options = [
            f"{name}={option_text(getattr(config, name))}"
            for name in names
            if name in option_names() and getattr(config, name) != getattr(default, name)
        ]
        return ", ".join([config.model, *options])

    def _costs(self, per_image: float) -> str:
        if self.device:
            return f"{per_image:.4g} s per image forward and backward, measured on {self.device}"
        return f"{per_image / 1e9:.4g} GFLOPs per image forward and backward, counted"

    def _stage_lines(self) -> list[str]:
        """Returns the stages as a table."""
        power, unit = (
            (30, "GiB") if max(memory.total for memory in self.memory) >= _GIB else (20, "MiB")
        )
        numbers = [
            (
                cost.parameters,
                cost.work,
                memory.weights + memory.gradients + memory.slots,
                memory.inputs,
                memory.activations,
                memory.total,
            )
            for cost, memory in zip(self.stages, self.memory)
        ]
        totals = [sum(column) for column in zip(*numbers)]
        width = max(len(cost.name) for cost in self.stages)
        lines = [
            f"stage     n  {'blocks':{width}}     parameters   work  weights   inputs  activations"
            "    total"
        ]
        stages = [str(stage) for stage in range(len(numbers))]
        names = [cost.name for cost in self.stages]
        for stage, count, name, row in zip(
            [*stages, "all"], [*self.balance, len(self.costs)], [*names, ""], [*numbers, totals]
        ):
            parameters, work, *memory = row
            fraction = work / totals[1]
            weights, inputs, activations, total = (size / 2**power for size in memory)
            lines.append(
                f"{stage:>5} {count:>5}  {name:{width}}  {parameters:>13,} {fraction:>6.1%} "
                f"{weights:>8.2f} {inputs:>8.2f} {activations:>12.2f} {total:>8.2f}"
            )
        return [
            *lines,
            f"{unit}; weights include gradients and optimizer slots; not included: gradients of "
            "activations and the operations' workspace",
        ]

    def _fit(self) -> str:
        """Returns whether the stages fit into the devices' memory."""
        most = max(self.device_memory)
        text = f"at most {most / _GIB:.4g} GiB of the {self.limit / _GIB:.4g} GiB of a device"
        if most > self.limit:
            return f"DOES NOT FIT: {text}"
        left = (self.limit - most) / _GIB
        return f"{text}, which leaves {left:.3g} GiB for what is not included"


def plan_pipeline(config: Config, costs: str = "flops", limit: float = math.inf) -> PipelinePlan:
    """Estimates a pipeline without creating the network's weights.

    Args:
      config: options of the run.
      costs: ``flops``, or ``measured`` on this process' first GPU or, without one, its CPU, with
        the weights of one block at a time.
      limit: bytes of each device.

    Raises:
      UserError: if the data or the model's options cannot be used, or the blocks cannot be split
        into these stages or do not fit.
    """
    stages = config.pipeline_stages
    if stages > 1:
        check_pipeline(config)
    # As on one device: building a pipeline would create the weights.
    alone = {"pipeline_stages": 1, "ema_decay": 0.0}
    with shape_only():
        model = build_classifier(config.replace(**alone), read_info(config).labels)
        blocks = cut(network_of(model))
    balance = config.pipeline_balance
    bounds(balance or None, len(blocks), stages)
    shape = (None, config.image_size, config.image_size, 3)
    inputs = tf.TensorSpec(shape, model.get_layer("normalize").compute_dtype)
    images = config.batch_size // config.accumulation_steps
    device = default_devices()[0] if costs == "measured" else ""
    cost = functools.partial(measure, device=device) if device else estimate
    block_costs = cost(blocks, inputs, images)
    slots = slots_of(config)
    if not balance:
        each = config.pipeline_stages_per_device
        order = tasks(config.pipeline_schedule, stages, config.accumulation_steps, stages // each)
        best = best_balance(
            block_costs,
            order,
            config.rematerialize,
            devices=stages // each,
            slots=slots,
            limit=limit,
        )
        balance = tuple(best)
    return PipelinePlan(config, tuple(block_costs), device, balance, slots, limit)
