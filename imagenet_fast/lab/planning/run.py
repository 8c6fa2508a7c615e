"""Estimates of a training run: step time, bottleneck, scaling, memory, duration and price."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence

import matplotlib.style
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.counted import counted
from imagenet_fast.base.durations import milliseconds
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.plotting import FILE_STYLE, SENTINELS, svg
from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import steps_by_size, steps_per_epoch
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size
from imagenet_fast.distribute.fusion import Fusion, fusion_candidates
from imagenet_fast.lab.planning.cost_model.compute import StepWork
from imagenet_fast.lab.planning.cost_model.fusion import few_segments
from imagenet_fast.lab.planning.cost_model.reliability import (
    Conditions,
    Job,
    JobTimes,
    best_interval,
    simulate_jobs,
)
from imagenet_fast.lab.planning.cost_model.step_time import ChipCluster, StepTime, step_time
from imagenet_fast.lab.planning.step_costs import count_step, slots_of
from imagenet_fast.lab.planning.validation.published import (
    STACKS,
    assumed_constants,
    fitted_constants,
    rows_of_chip,
    stack_for,
)
from imagenet_fast.training.schedule_steps import total_steps

_GIB = 2**30
_GRADIENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The smallest fraction of a step that is worth advice.
_NEGLIGIBLE = 0.002
_JOBS = 200
# The least fraction of a compiled step's memory that was estimated: docs/planning.md.
_ESTIMATED_FRACTION = 0.78


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware of a run.

    Attributes:
      accelerator: the kind of chip; see ``cost_model.accelerators``.
      chips: their number.
      network_gbits: network bandwidth of each host in Gbit/s, for GPUs only.
      host_images: images/s that a host's processors prepare; 0: always enough.
      conditions: reliability of the devices.

    Raises:
      UserError: if the number of images is negative.
    """

    accelerator: str
    chips: int
    network_gbits: float = 100.0
    host_images: float = 0.0
    conditions: Conditions = Conditions()

    def __post_init__(self) -> None:
        if self.host_images < 0:
            raise UserError(f"host_images is {self.host_images:g}, but must not be negative")

    @functools.cached_property
    def cluster(self) -> ChipCluster:
        """All the chips."""
        return ChipCluster.of(self.accelerator, self.chips, self.network_gbits)


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The memory of the compiled step, as ``imagenet-fast compile`` reports it.

    Attributes:
      peak: bytes that a replica needs.
      usable: bytes that are available to a replica's step.
      compiler: name and version.
    """

    peak: int
    usable: int
    compiler: str


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The estimates for a run.

    Attributes:
      config: options of the run.
      hardware: on which it runs.
      examples: number of training images.
      steps: number of weight updates.
      step: the work of a replica in a step, on images of ``image_size``.
      others: the number of steps on images of other sizes, and the work in each of them, by size.
      compiled: the step's memory by its compiler; None: it is estimated.
    """

    config: Config
    hardware: Hardware
    examples: int
    steps: int
    step: StepWork
    others: Mapping[int, tuple[int, StepWork]] = dataclasses.field(default_factory=dict)
    compiled: CompiledMemory | None = None

    @property
    def stack(self) -> str:
        """The software stack whose constants are used."""
        return stack_for(self.hardware.accelerator, self.config.precision)

    @functools.cached_property
    def time(self) -> StepTime:
        """The duration of a step."""
        return self._time(self.hardware.cluster, self.cuts)

    @functools.cached_property
    def cuts(self) -> tuple[int, ...] | None:
        """Where the run cuts gradients, or None where it is best."""
        config = self.config
        fusion = Fusion(config.fusion_bytes, config.fusion_segments)
        torus = self.hardware.cluster.accelerator.torus
        by_compiler = torus and config.all_reduce != "torus_2d" and not fusion.segments
        if by_compiler:
            return None
        shapes = [(gradient.elements,) for gradient in self.step.gradients]
        dtypes = [tf.float32] * len(shapes)
        if config.fusion == "auto":
            candidates = fusion_candidates(config.model, config.fusion_bytes, shapes, dtypes)
            cluster = self.hardware.cluster
            return min(candidates, key=lambda cuts: self._time(cluster, cuts).total)
        return fusion.cuts(shapes, dtypes)

    @property
    def images_per_second(self) -> float:
        """The throughput of all replicas, on images of ``image_size``."""
        return self.config.batch_size / self.time.total

    @functools.cached_property
    def seconds(self) -> float:
        """The duration of all steps."""
        others = sum(steps for steps, _ in self.others.values())
        return (self.steps - others) * self.time.total + sum(
            steps * self._time(self.hardware.cluster, self.cuts, step=step).total
            for steps, step in self.others.values()
        )

    @property
    def scaling(self) -> float:
        """The throughput relative to the same number of independent chips."""
        alone = self._time(dataclasses.replace(self.hardware.cluster, chips=1), ())
        return alone.total / self.time.total

    @property
    def fits(self) -> bool:
        """Whether a replica has enough memory."""
        return self.memory <= self.memory_limit

    @property
    def tight(self) -> bool:
        """Whether the memory that the estimate leaves out may be more than what is left."""
        return (
            not self.compiled
            and self.fits
            and self.memory / _ESTIMATED_FRACTION > self.memory_limit
        )

    @property
    def memory(self) -> float:
        """Bytes that a replica needs."""
        return self.compiled.peak if self.compiled else self.estimated_memory

    @property
    def memory_limit(self) -> float:
        """Bytes that a replica has."""
        if self.compiled:
            return self.compiled.usable
        return self.hardware.cluster.accelerator.core_memory

    @property
    def estimated_memory(self) -> float:
        """Estimated bytes that a replica needs, without the operations' workspace."""
        return self.step.memory(STACKS[self.stack].fuses)

    @property
    def dollars(self) -> float | None:
        """The price of all steps; None if it is unknown."""
        price = self.hardware.cluster.accelerator.price
        if price is None:
            return None
        return price.dollars * self.hardware.chips * self.seconds / 3600

    @functools.cached_property
    def segments(self) -> tuple[int, ...]:
        """The fewest segments of gradients that are about as fast as the best ones."""
        sizes = [self._gradient_bytes * gradient.elements for gradient in self.step.gradients]
        cost = self.hardware.cluster.all_reduce_cost(self._algorithm, exchange=self._exchange)
        compute = self.time.compute
        return few_segments(compute.gradients_ready, sizes, cost, _NEGLIGIBLE * compute.total)

    @functools.cached_property
    def times(self) -> JobTimes:
        """The duration of simulated runs under the hardware's conditions."""
        return simulate_jobs(self._job(), self.hardware.conditions, _JOBS, self.config.seed)

    def table(self) -> str:
        """Returns the plan as text."""
        config, cluster, time, ms = self.config, self.hardware.cluster, self.time, milliseconds
        chip, compute = cluster.accelerator, time.compute
        epochs = self.steps / self._steps_per_epoch
        parts = f" in {self.step.micro_batches} micro-batches" * (self.step.micro_batches > 1)
        need = self.images_per_second / cluster.hosts
        lines = [
            f"run         {config.model}, {self.step.parameters:,} parameters, {config.precision}, "
            f"{config.optimizer}; batch {config.batch_size:,}, {self.steps:,} steps, "
            f"{epochs:.4g} epochs",
            f"hardware    {self.hardware.chips:,} {chip.title}, {counted(cluster.hosts, 'host')}: "
            f"{counted(cluster.replicas, 'replica')} of {counted(self.step.all_images, 'image')}"
            f"{parts}",
            f"memory      {self._memory_line()}",
            f"work        {self.step.flops / self.step.all_images / 1e9:.4g} GFLOPs per image, "
            f"{self.step.unpadded_flops / self.step.images / 1e9:.4g} without padding, as XLA "
            "counts",
            f"step        {ms(time.total)}: forward {ms(compute.forward)}, backward "
            f"{ms(compute.backward)}, update {ms(compute.update)}"
            + f", selecting images {ms(compute.selection)}"
            * bool(compute.selection),
            f"all-reduce  {ms(time.all_reduce)} for gradients, {ms(time.exposed)} of it after the "
            f"backward pass; {ms(time.batch_norm)} for batch norm",
            f"bound by    {_BOUNDS[time.bound]}",
            f"input       {need:,.0f} images/s from each host",
            f"throughput  {self.images_per_second:,.0f} images/s, {self.scaling:.1%} of linear "
            "scaling",
            *self._sizes(),
            f"time        {_duration(self.seconds)} of training{self._distribution()}",
            f"price       {self._price()}",
            "",
            "algorithm   all-reduce   after the backward pass",
            *(
                f"{name:12}{ms(step.all_reduce):>10}   {ms(step.exposed)}"
                for name, step in self._by_algorithm().items()
            ),
            "",
            *self._advice(),
            f"constants   of {self.stack}: {fitted_constants(STACKS[self.stack])}",
            *(f"            {line}" for line in assumed_constants(self._links())),
            f"checked     {self._checked()}",
            "excluded    evaluation, startup, compilation",
        ]
        return "\n".join(lines)

    def files(self) -> dict[str, str]:
        """Returns the contents of the plan's files, by name."""
        return {
            "plan.txt": self.table() + "\n",
            "plan.json": self.json(),
            "plan.svg": self.picture(),
        }

    def json(self) -> str:
        """Returns the plan as JSON."""
        time = self.time
        values = {
            "accelerator": self.hardware.accelerator,
            "chips": self.hardware.chips,
            "replicas": self.hardware.cluster.replicas,
            "images_of_a_replica": self.step.all_images,
            "steps": self.steps,
            "step_seconds": time.total,
            "forward": time.compute.forward,
            "backward": time.compute.backward,
            "update": time.compute.update,
            "selection": time.compute.selection,
            "sums": time.all_reduce,
            "exposed": time.exposed,
            "batch_norm": time.batch_norm,
            "bound": time.bound,
            "images_per_second": self.images_per_second,
            "steps_of_other_sizes": {size: steps for size, (steps, _) in self.others.items()},
            "scaling": self.scaling,
            "seconds": self.seconds,
            "seconds_quantiles": {
                f"{quantile:g}": float(np.quantile(self.times.total, quantile))
                for quantile in (0.05, 0.5, 0.95)
            },
            "memory_bytes": self.memory,
            "estimated_memory_bytes": self.estimated_memory,
            "compiled_memory": self.compiled and dataclasses.asdict(self.compiled),
            "fits": self.fits,
            "dollars": self.dollars,
            "segments": self.segments,
            "constants": self.stack,
            "options": {
                name: getattr(self.config, name)
                for name in ("model", "batch_size", "precision", "optimizer", "all_reduce")
            },
            **environment.provenance(),
        }
        return json.dumps(values, indent=2) + "\n"

    def picture(self) -> str:
        """Returns a plot of weak scaling, throughput by the number of chips, as SVG."""
        most = self.hardware.cluster.accelerator.most_chips or 4 * self.hardware.chips
        chips = [2**power for power in range(13) if 2**power <= most]
        speeds = []
        for count in chips:
            cluster = dataclasses.replace(self.hardware.cluster, chips=count)
            time = self._time(cluster, self.cuts, groups=False)
            speeds.append(cluster.replicas * self.step.all_images / time.total)
        with matplotlib.style.context(FILE_STYLE):
            figure = Figure(figsize=(5.5, 3.2), layout="constrained")
            axes = figure.add_subplot()
            ideal = [speeds[0] * count / chips[0] for count in chips]
            axes.plot(chips, ideal, color=SENTINELS["muted"], lw=0.9, ls=(0, (1.5, 2.5)))
            axes.plot(chips, speeds, color=SENTINELS["validation"], marker="o", ms=3.6)
            axes.plot(
                [self.hardware.chips], [self.images_per_second], "o", color=SENTINELS["train"], ms=7
            )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel(
                f"{self.hardware.cluster.accelerator.title}, "
                f"{self.step.all_images} images per replica"
            )
            axes.set_ylabel("images/s; dotted: linear")
            axes.grid(axis="y")
            return svg(figure)

    @property
    def _gradient_bytes(self) -> int:
        return _GRADIENT_BYTES[self.config.all_reduce_dtype]

    @property
    def _exchange(self) -> bool:
        """Whether training uses the all-reduce of ``distribute/collectives.py``."""
        return self.config.all_reduce_dtype != "float32"

    def _time(
        self,
        cluster: ChipCluster,
        segments: Sequence[int] | None,
        algorithm: str = "",
        groups: bool = True,
        step: StepWork | None = None,
    ) -> StepTime:
        group = batch_norm_group_size(
            self.config.batch_norm_batch_size * groups, self.step.images, cluster.replicas
        )
        return step_time(
            step or self.step,
            cluster,
            STACKS[self.stack],
            algorithm=algorithm or self._algorithm,
            gradient_bytes=self._gradient_bytes,
            exchange=self._exchange,
            segments=segments,
            batch_norm_group=group,
            host_images=self.hardware.host_images or float("inf"),
        )

    def _by_algorithm(self) -> dict[str, StepTime]:
        cluster = self.hardware.cluster
        names = _algorithms(cluster)
        # Otherwise builtin is the same ring as flat.
        if self._exchange and "flat" in names:
            names = ("builtin", *names)
        return {name: self._time(cluster, self.cuts, name) for name in names}

    @property
    def _algorithm(self) -> str:
        """The run's all-reduce; TPUs use the builtin one in place of those that they lack."""
        requested, torus = self.config.all_reduce, self.hardware.cluster.accelerator.torus
        missing = requested not in _algorithms(self.hardware.cluster)
        return "builtin" if torus and missing else requested

    @property
    def _steps_per_epoch(self) -> int:
        return self.examples // self.config.batch_size

    def _job(self) -> Job:
        time = self.time
        every = self.config.checkpoint_every
        # The mean over image sizes, relative to a step on images of image_size.
        scale = self.seconds / (self.steps * time.total)
        return Job(
            devices=self.hardware.cluster.chips,
            steps=self.steps,
            device_seconds=scale * time.compute.total,
            other_seconds=scale * (time.total - time.compute.total),
            checkpoint_steps=max(1, every.steps(self._steps_per_epoch, self.config.batch_size)),
        )

    def _sizes(self) -> list[str]:
        """Returns the lines of image sizes other than ``image_size``, of which the others are."""
        return [
            f"sizes       {steps:,} steps of {size} px, each "
            f"{milliseconds(self._time(self.hardware.cluster, self.cuts, step=step).total)}; all "
            f"else for {self.config.image_size} px"
            for size, (steps, step) in self.others.items()
        ]

    def _distribution(self) -> str:
        """Returns the simulated duration's distribution, if conditions are given."""
        if self.hardware.conditions == Conditions():
            return ""
        quantiles = np.quantile(self.times.total, [0.5, 0.05, 0.95])
        median, low, high = (_duration(float(seconds)) for seconds in quantiles)
        return f"; with waiting and failures {median} ({low} to {high} in 90% of cases)"

    def _links(self) -> str:
        """Returns the bandwidths that the plan assumes."""
        cluster = self.hardware.cluster
        chip = cluster.accelerator
        if chip.torus:
            return f"{chip.link / 1e9:g} GB/s through each of the torus' {2 * chip.torus} links"
        network = f", {8e-9 * cluster.host_bandwidth:g} Gbit/s between hosts (--network_gbits)"
        return f"{chip.link / 1e9:g} GB/s between GPUs of a host" + network * (cluster.hosts > 1)

    def _checked(self) -> str:
        """Returns which published numbers of this kind of chip the cost model was held against."""
        chip = self.hardware.cluster.accelerator
        count = len(rows_of_chip(chip.name))
        if not count:
            return f"against no published number: none of {chip.title} is known to this program"
        return f"against {count} published numbers of {chip.title}: see plan --validate"

    def _memory_line(self) -> str:
        line = f"{self.memory / _GIB:.3g} of {self.memory_limit / _GIB:.3g} GiB per replica"
        if self.compiled:
            estimate = f"{self.estimated_memory / _GIB:.3g} GiB by the cost model"
            line += f", by {self.compiled.compiler} ({estimate})"
        else:
            line += ", without the operations' workspace"
        if not self.fits:
            return f"{line}: DOES NOT FIT"
        return f"{line}: MAY NOT FIT" if self.tight else line

    def _parts_that_fit(self) -> str:
        """Returns the fewest accumulation steps that fit, if memory is linear in the images."""
        images = self.step.all_images
        fixed = self.estimated_memory - self._kept
        each = (self.memory - fixed) / self.step.images
        for parts in range(self.step.micro_batches + 1, images + 1):
            if images % parts == 0 and fixed + each * images / parts <= self.memory_limit:
                return f"it may fit with --accumulation_steps={parts}"
        return "no --accumulation_steps makes it fit: use a smaller batch_size or more chips"

    @property
    def _kept(self) -> float:
        """Bytes of activations."""
        fuses = STACKS[self.stack].fuses
        return self.step.fused_kept_bytes if fuses else self.step.kept_bytes

    def _price(self) -> str:
        price = self.hardware.cluster.accelerator.price
        if price is None:
            return "unknown"
        return (
            f"${self.dollars:,.2f}: ${price.dollars:g} an hour for {price.covers}; {price.source}"
        )

    def _advice(self) -> list[str]:
        lines = []
        if not self.fits:
            lines.append(f"advice      {self._parts_that_fit()}")
        if self.tight:
            lines.append(
                "advice      imagenet-fast compile shows whether the step fits with its workspace"
            )
        if self.time.bound == "input":
            lines.append(
                "advice      the hosts prepare too few images: cache them (--cache), or add input "
                "servers (--input_servers)"
            )
        by_algorithm = self._by_algorithm()
        best = min(by_algorithm, key=lambda name: by_algorithm[name].total)
        gain = 1 - by_algorithm[best].total / self.time.total
        if gain > _NEGLIGIBLE:
            lines.append(f"advice      --all_reduce={best} saves {gain:.1%} of a step")
        gain = 1 - self._time(self.hardware.cluster, self.segments).total / self.time.total
        cuts = ",".join(map(str, self.segments))
        flag = f"--fusion_segments={cuts}" if cuts else "--fusion_bytes=0"
        if self.cuts is None:
            lines.append(f"segments    {flag} is as good as any")
        elif gain > _NEGLIGIBLE:
            lines.append(f"advice      {flag} saves {gain:.1%} of a step")
        rate = self.hardware.conditions.failure_rate(self.hardware.chips)
        pause = self.hardware.conditions.checkpoint_seconds
        if rate and pause:
            steps = best_interval(pause, rate) / self.time.total
            when = f"every {steps:,.0f} steps" if steps < self.steps else "at the end only"
            lines.append(f"checkpoints {when} lose the least time")
        return lines


def _algorithms(cluster: ChipCluster) -> tuple[str, ...]:
    """Returns the all-reduce algorithms that training supports on a cluster."""
    if cluster.accelerator.torus:
        return ("builtin", "torus_2d")
    # The GPUs of one host belong to one process, which uses no network.
    return ("builtin",) if cluster.hosts == 1 else ("flat", "hierarchical", "torus_2d")


_BOUNDS = {
    "input": "input: the images that hosts prepare",
    "all-reduce": "all-reduces over replicas",
    "matrices": "arithmetic of convolutions and dense layers",
    "memory": "memory traffic",
}


def plan_run(config: Config, hardware: Hardware, compiled: CompiledMemory | None = None) -> RunPlan:
    """Estimates a run.

    Its cluster options are ignored. ``compiled`` is the memory of the compiled step, if there is
    one.

    Raises:
      UserError: if the data, the hardware or the model's options cannot be used, or the batch
        cannot be split evenly over the replicas.
    """
    if config.pipeline_stages > 1:
        raise UserError("this plan is for runs without a pipeline: use plan --pipeline")
    if config.fusion == "auto" and hardware.cluster.accelerator.torus:
        raise UserError(
            "fusion=auto is not for TPUs, whose compiler orders the all-reduces: leave it out"
        )
    replicas = hardware.cluster.replicas
    config, info = _accumulated(config, replicas), read_info(config)
    parts = replicas * config.accumulation_steps
    if config.batch_size % parts:
        raise UserError(
            f"batch_size {config.batch_size:,} cannot be split evenly over {replicas:,} replicas "
            f"with accumulation_steps={config.accumulation_steps}"
        )
    per_epoch = steps_per_epoch(info, config)
    images = config.batch_size // parts
    total = total_steps(config, per_epoch)
    by_size = steps_by_size(config, per_epoch, total)
    work = {
        size: count_step(
            config.with_image_size(size), images, config.accumulation_steps, slots_of(config)
        )
        for size, steps in by_size.items()
        if steps or size == config.image_size
    }
    step = work.pop(config.image_size)
    plan = RunPlan(
        config,
        hardware,
        info.splits["train"].examples,
        total,
        step,
        {size: (by_size[size], own) for size, own in work.items()},
        compiled,
    )
    _ = plan.time  # raises errors here, not in the middle of a table
    return plan


def _accumulated(config: Config, devices: int) -> Config:
    """Returns a configuration whose devices accumulate what logical replicas would be in turn.

    Raises:
      UserError: if the devices cannot carry equally many replicas.
    """
    if not config.replicas:
        return config
    (replicas, *_), steps = config.replicas, config.accumulation_steps
    if replicas % devices:
        raise UserError(
            f"{replicas:,} replicas cannot be shared equally by {devices:,} devices: use a divisor "
            f"of {replicas:,}, or other --replicas"
        )
    return config.replace(replicas=(), accumulation_steps=steps * replicas // devices)


def comparison(plans: Sequence[RunPlan], labels: Sequence[str]) -> str:
    """Returns a table of plans, one in each row."""
    width = max(map(len, labels))
    lines = [
        f"{'':{width}}  images each      step  after backward  bound by        images/s  scaling"
        "        time       price"
    ]
    for label, plan in zip(labels, plans):
        price = "" if plan.dollars is None else f"${plan.dollars:,.2f}"
        fits = "" if plan.fits else "  DOES NOT FIT"
        lines.append(
            f"{label:{width}}  {plan.step.all_images:>11,} {milliseconds(plan.time.total):>9}  "
            f"{milliseconds(plan.time.exposed + plan.time.batch_norm):>14}  {plan.time.bound:10}  "
            f"{plan.images_per_second:>12,.0f}  {plan.scaling:>7.1%}  "
            f"{_duration(plan.seconds):>10}  {price:>10}{fits}"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
