"""Lowers, checks, compiles and compares the training step of a recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute.batch_norm_groups import images_together
from imagenet_fast.distribute.groups import consecutive
from imagenet_fast.distribute.strategy import per_replica_batch_size
from imagenet_fast.distribute.virtual import VirtualGPUStrategy, VirtualStrategy, VirtualTPUStrategy
from imagenet_fast.lab.xla_compile.check import Check, check_types
from imagenet_fast.lab.xla_compile.check_all_reduces import check_all_reduces
from imagenet_fast.lab.xla_compile.check_compiled import check_compiled, computed_twice
from imagenet_fast.lab.xla_compile.compare import (
    Batches,
    Difference,
    differences,
    require_comparable,
    take_reference_steps,
    write_inputs,
)
from imagenet_fast.lab.xla_compile.compiler import (
    Compiler,
    Program,
    RefusedError,
    Topology,
    platform_of,
    require_packages,
    start_compiler,
)
from imagenet_fast.lab.xla_compile.gpus import GpuTopology
from imagenet_fast.lab.xla_compile.lower import LoweredStep, lower_step
from imagenet_fast.lab.xla_compile.progress import doing
from imagenet_fast.lab.xla_compile.search import batch_sizes, divisors, largest_that_fits
from imagenet_fast.models.options import MODEL_NAMES
from imagenet_fast.training.build.model import build_model
from imagenet_fast.training.step.classifier import Classifier

_GIB = 2**30
# The most images per device that --find_batch tries.
_MAX_IMAGES = 65_536


class Trial(NamedTuple):
    """A variant of a recipe that was compiled during a search for one that fits.

    Attributes:
      size: images of a GPU in a step, or accumulation steps.
      peak: memory of a GPU in bytes; None: the variant is invalid.
      computed_twice: operations that XLA recomputes to save memory.
      refusal: why the variant is invalid.
    """

    size: int
    peak: int | None
    computed_twice: int
    refusal: str = ""

    def fits(self, usable: int) -> bool:
        """Whether it is valid, and needs at most so many bytes."""
        return self.peak is not None and self.peak <= usable


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The result of compiling a recipe's training step.

    Attributes:
      config: options of the recipe.
      topology: that it was compiled for.
      packages: versions of the compiler's packages.
      parameters: number of trainable parameters.
      checks: of the lowered step.
      program: the compiled step; None: the compiler rejected it.
      refusal: the compiler's reason.
      compiled: checks of the compiled step; for GPUs only.
      computed_twice: operations that XLA recomputes to save memory.
      batches: trials of ``find_batch``, by ascending images of a GPU.
      accumulations: trials of accumulation steps if the recipe does not fit, ascending.
      steps: that were run on this machine's CPU.
      differences: between the replicas and one device after these steps.
    """

    config: Config
    topology: Topology
    packages: dict[str, str]
    parameters: int
    checks: tuple[Check, ...]
    program: Program | None
    refusal: str = ""
    compiled: tuple[Check, ...] = ()
    computed_twice: int = 0
    batches: tuple[Trial, ...] = ()
    accumulations: tuple[Trial, ...] = ()
    steps: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def batch(self) -> int:
        """Images of a replica in a step."""
        return self.config.batch_size // len(self.topology.coordinates)

    @property
    def fits(self) -> bool:
        """Whether the program fits into memory, as far as that is known."""
        usable = self.topology.usable
        return self.program is None or not usable or self.program.peak <= usable

    @property
    def failure(self) -> str:
        """All errors in one line, or an empty string."""
        wrong = [f"{check.name}: {check.wrong}" for check in self.checks if check.wrong]
        reasons = []
        if wrong:
            reasons.append(f"the step is not what the recipe says: {'; '.join(wrong)}")
        if self.program is None:
            reasons.append(f"it does not compile for {self.topology.name}: {self.refusal}")
        reasons += [check.wrong for check in self.compiled if check.wrong]
        if self.program is not None and not self.fits:
            reasons.append(self._does_not_fit(self.program))
        far = [difference.kind for difference in self.differences if difference.wrong]
        if far:
            reasons.append(f"on this machine's processor: {' and '.join(far)} are wrong")
        return "; ".join(reasons)

    def _does_not_fit(self, program: Program) -> str:
        message = (
            f"it does not fit: {self.batch:,} images a GPU need {program.peak / _GIB:.2f} "
            f"GiB, and a step can have {self.topology.usable / _GIB:.2f} GiB of the "
            f"{self.topology.memory / _GIB:.2f} of {self.topology.kind}"
        )
        usable = self.topology.usable
        fitting = [trial.size for trial in self.accumulations if trial.fits(usable)]
        if fitting:
            return f"{message}; the smallest --accumulation_steps that fits is {min(fitting)}"
        if self.accumulations:
            return f"{message}, and no --accumulation_steps makes it fit: use a smaller batch_size"
        return message


def compile_recipe(
    config: Config, topology: str, steps_on_cpu: int = 0, find_batch: bool = False
) -> Compilation:
    """Compiles the training step of a recipe.

    With ``train_sizes`` or ``size_ramp`` it compiles the step of the largest images, which needs
    the most memory. The result reports errors of the step and of the compiler.

    Args:
      config: options of the recipe; ``strategy`` is ignored. Without data, ``num_classes`` is 1,000
        unless given.
      topology: such as ``v3:2x2`` or ``h100:1x8``.
      steps_on_cpu: steps to run on this machine's CPU and to compare with one device; 0: none.
      find_batch: whether to search for the largest batch per GPU that fits, and to return that.

    Raises:
      UserError: if the topology does not exist, no compiler is installed, or an option is invalid.
    """
    platform = platform_of(topology)
    if find_batch and platform == "TPU":
        raise UserError("find_batch is for GPUs: XLA's TPU compiler rejects what is too large")
    packages = require_packages(platform)
    _require_compilable(config)
    config = config.replace(strategy="tpu", xla=False, image_size=config.largest_image_size)
    if not config.data_dir:
        config = config.replace(synthetic=True, num_classes=config.num_classes or 1000)
    with start_compiler(platform) as compiler:
        recipe = _Recipe(config, compiler, compiler.topology(topology), packages)
        if config.all_reduce == "hierarchical" and config.all_reduce_group:
            # Training checks this, too. The compiled all-reduce is over all replicas.
            consecutive(len(recipe.topology.coordinates), config.all_reduce_group)
        if find_batch:
            found = recipe.with_largest_batch()
        else:
            model, step = recipe.lowered(config)
            if steps_on_cpu:
                require_comparable(config, model, len(recipe.topology.coordinates))
            found = recipe.compiled(config, model, step)
            if not found.fits:
                found = dataclasses.replace(found, accumulations=recipe.accumulations(found))
    if steps_on_cpu:
        with doing(f"running {steps_on_cpu} steps on {recipe.replicas} replicas and on one device"):
            differ = _compare(config, model, step, steps_on_cpu)
        found = dataclasses.replace(found, steps=steps_on_cpu, differences=tuple(differ))
    return found


class _Recipe:
    """Compiles variants of a recipe for a topology."""

    def __init__(
        self, config: Config, compiler: Compiler, topology: Topology, packages: dict[str, str]
    ) -> None:
        self.topology = topology
        self.replicas = len(topology.coordinates)
        self._config = config
        self._compiler = compiler
        self._packages = packages

    def lowered(self, config: Config) -> tuple[Classifier, LoweredStep]:
        """Returns the model of a variant and its lowered step."""
        strategy = _strategy(self.topology)
        batch = per_replica_batch_size(config, strategy)
        with doing(
            f"lowering the step of {config.model} for {self.topology}, {batch:,} images each"
        ):
            with _without_warnings():
                model = build_model(config, strategy)
            return model, lower_step(model, batch, config.image_size)

    def compiled(self, config: Config, model: Classifier, step: LoweredStep) -> Compilation:
        """Checks and compiles a variant's step."""
        images, classes = config.batch_size // self.replicas, len(model.labels)
        checks = (
            *check_types(step, config, images, classes, config.model not in MODEL_NAMES),
            *check_all_reduces(step.module, config, model),
        )
        with doing(f"compiling it for {self.topology.name}, which takes a minute or more"):
            program, refusal = _compile(self._compiler, self.topology, step)
        found, twice = [], 0
        if program is not None and isinstance(self.topology, GpuTopology):
            optimized, gpu = program.optimized, self.topology.gpu
            assert optimized is not None
            found = check_compiled(optimized, step.module, config, gpu, self.replicas)
            twice = computed_twice(optimized)
            # The modules of many variants would fill this process' memory.
            program = dataclasses.replace(program, optimized=None)
        return Compilation(
            config,
            self.topology,
            self._packages,
            sum(variable.shape.num_elements() for variable in model.trainable_variables),
            checks,
            program,
            refusal,
            tuple(found),
            twice,
        )

    def with_largest_batch(self) -> Compilation:
        """Returns the variant with the largest batch that fits; if none does, the smallest one."""
        parts = self._config.accumulation_steps
        done: dict[int, Compilation] = {}
        tried: dict[int, Trial] = {}

        def compiled(images: int) -> int | None:
            config = self._config.replace(batch_size=images * parts * self.replicas)
            try:
                model, step = self.lowered(config)
            except UserError as error:
                # A larger batch may be invalid, such as if there are fewer images.
                if not done:
                    raise
                tried[images] = Trial(images * parts, None, 0, str(error))
            else:
                done[images] = self.compiled(config, model, step)
                tried[images] = _trial(images * parts, done[images])
            return tried[images].peak

        candidates = [size for size in batch_sizes(_MAX_IMAGES) if self._can_normalize(size)]
        requested = self._config.batch_size // parts // self.replicas
        first = max((size for size in candidates if size <= requested), default=candidates[0])
        known = {first: compiled(first)}
        largest = largest_that_fits(candidates, self.topology.usable, compiled, known)
        return dataclasses.replace(
            done[largest or min(done)],
            batches=tuple(tried[images] for images in sorted(tried)),
        )

    def _can_normalize(self, images: int) -> bool:
        """Whether a replica's images can be split into batch-norm groups."""
        try:
            images_together(self._config.batch_norm_batch_size, images, self.replicas)
        except UserError:
            return False
        return True

    def accumulations(self, found: Compilation) -> tuple[Trial, ...]:
        """Returns the trials of a search for the fewest accumulation steps that fit."""
        images, present = found.batch, found.config.accumulation_steps
        tried = {present: _trial(present, found)}

        def compiled(part: int) -> int | None:
            steps = images // part
            config = found.config.replace(accumulation_steps=steps)
            try:
                tried[steps] = _trial(steps, self.compiled(config, *self.lowered(config)))
            except UserError as error:  # such as for batch-norm groups or mixup
                tried[steps] = Trial(steps, None, 0, str(error))
            return tried[steps].peak

        parts = [part for part in divisors(images) if part <= images // present]
        known = {images // present: tried[present].peak}
        largest_that_fits(parts, self.topology.usable, compiled, known)
        return tuple(tried[steps] for steps in sorted(tried))


def _trial(size: int, found: Compilation) -> Trial:
    peak = found.program.peak if found.program else None
    return Trial(size, peak, found.computed_twice, found.refusal)


def _strategy(topology: Topology) -> VirtualStrategy:
    kind = VirtualGPUStrategy if isinstance(topology, GpuTopology) else VirtualTPUStrategy
    return kind(topology.coordinates)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides Keras' warning that this machine has no GPU for float16."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _require_compilable(config: Config) -> None:
    """Raises a UserError if an option cannot be compiled without the devices or the data."""
    if config.pipeline_stages > 1:
        raise UserError(
            "pipeline_stages: the stages of a pipeline are different programs, not one for all "
            "replicas; leave it out"
        )
    if config.fusion == "auto":
        raise UserError(
            "fusion=auto measures on the devices that train, which are not here: give "
            "--fusion_segments instead; `imagenet-fast plan --accelerator` suggests them"
        )
    if config.data_on_device:
        raise UserError(
            "data_on_device: the device would make batches from all images, which are not here; "
            "compile the rest of the step with --nodata_on_device --noalternating_flip "
            "--noaugment_in_groups"
        )


def _compile(
    compiler: Compiler, topology: Topology, step: LoweredStep
) -> tuple[Program | None, str]:
    try:
        return compiler.compile(topology, step.serialized), ""
    except RefusedError as error:
        sources = dict.fromkeys(step.module.sources_in(error.message))
        return None, f"{error} (of {', '.join(sources)})" if sources else str(error)


def _compare(config: Config, model: Classifier, step: LoweredStep, steps: int) -> list[Difference]:
    replicas = model.distribute_strategy.num_replicas_in_sync
    batches = Batches.random(config, replicas, steps, len(model.labels))
    reference = take_reference_steps(config, model, batches)
    platform = model.distribute_strategy.device_type
    with tempfile.TemporaryDirectory() as folder, start_compiler(platform, replicas) as processor:
        inputs = pathlib.Path(folder) / "inputs.npz"
        write_inputs(inputs, step, batches, reference)
        found = processor.run(step.serialized, inputs, step.module.updates, steps)
    return differences(config, step, reference, found)
