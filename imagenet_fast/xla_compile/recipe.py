"""A recipe's training step for a TPU: lowered, checked, compiled, compared."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile

from imagenet_fast.config import Config
from imagenet_fast.distribute.strategy import per_replica_batch_size
from imagenet_fast.distribute.virtual_tpu import VirtualTPUStrategy
from imagenet_fast.errors import UserError
from imagenet_fast.training.build import build_model
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.xla_compile.check import Check, check_types
from imagenet_fast.xla_compile.check_sums import check_sums
from imagenet_fast.xla_compile.compare import (
    Batches,
    Difference,
    differences,
    require_comparable,
    take_reference_steps,
    write_inputs,
)
from imagenet_fast.xla_compile.compiler import (
    Compiler,
    Program,
    RefusedError,
    Topology,
    require_packages,
    start_compiler,
)
from imagenet_fast.xla_compile.lower import LoweredStep, lower_step


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What became of a recipe's training step.

    Attributes:
      config: of the recipe.
      topology: for which it was compiled.
      packages: the versions of those that compiled.
      parameters: numbers that are trained.
      checks: what the lowered step is made of.
      program: what the compiler made of it; None: it refused.
      refusal: why.
      steps: that were taken on this machine's processor.
      differences: of the replicas from one device after these.
    """

    config: Config
    topology: Topology
    packages: dict[str, str]
    parameters: int
    checks: tuple[Check, ...]
    program: Program | None
    refusal: str = ""
    steps: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def batch(self) -> int:
        """Images of a replica in a step."""
        return self.config.batch_size // len(self.topology.coordinates)

    @property
    def failure(self) -> str:
        """What is wrong, in a line, or nothing."""
        wrong = [f"{own.name}: {own.wrong}" for own in self.checks if own.wrong]
        reasons = []
        if wrong:
            reasons.append(f"the step is not what the recipe says: {'; '.join(wrong)}")
        if self.program is None:
            reasons.append(f"it does not compile for {self.topology.name}: {self.refusal}")
        far = [own.kind for own in self.differences if own.wrong]
        if far:
            reasons.append(f"replicas end with other {' and '.join(far)} than one device")
        return "; ".join(reasons)


def compile_recipe(config: Config, topology: str, steps_on_cpu: int = 0) -> Compilation:
    """Compiles the training step that ``config`` describes.

    What it finds wrong with the step, and what the compiler refuses, is in what it returns.

    Args:
      config: of the recipe; its strategy does not count. Without data it is for as many classes as
        it says, or 1,000.
      topology: name of a TPU's, as ``v3:2x2``.
      steps_on_cpu: steps to take on this machine's processor, and to compare; 0: none.

    Raises:
      UserError: if there is no such topology, no compiler, or an option cannot be used.
    """
    packages = require_packages()
    _require_compilable(config)
    config = config.replace(strategy="tpu", xla=False)
    if not config.data_dir:
        config = config.replace(synthetic=True, num_classes=config.num_classes or 1000)
    with start_compiler() as compiler:
        cores = compiler.topology(topology)
        strategy = VirtualTPUStrategy(cores.coordinates)
        batch = per_replica_batch_size(config, strategy)
        model = build_model(config, strategy)
        replicas = len(cores.coordinates)
        if steps_on_cpu:
            require_comparable(config, model, replicas)
        _tell(f"lowering the step of {config.model} for {cores}")
        step = lower_step(model, batch, config.image_size)
        checks = (
            *check_types(step, config, batch // config.accumulation_steps, len(model.labels)),
            *check_sums(step.module, config, model),
        )
        _tell("compiling it, which takes minutes for a large network")
        program, refusal = _compile(compiler, cores, step)
    found = []
    if steps_on_cpu:
        _tell(f"taking {steps_on_cpu} steps of {replicas} replicas, and of one device")
        found = _compare(config, model, step, steps_on_cpu)
    return Compilation(
        config,
        cores,
        packages,
        sum(variable.shape.num_elements() for variable in model.trainable_variables),
        checks,
        program,
        refusal,
        steps_on_cpu,
        tuple(found),
    )


def _require_compilable(config: Config) -> None:
    """Raises a UserError if the options are not for a TPU, or need what is not here."""
    if config.pipeline_stages > 1:
        raise UserError(
            "pipeline_stages: a pipeline is many programs on devices of their own, none of which "
            "is for a TPU's replicas; leave it out"
        )
    if config.data_on_device:
        raise UserError(
            "data_on_device: the device would make its batches of all images, which are not here; "
            "what it does with a batch is compiled with --nodata_on_device --noalternating_flip "
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
    with tempfile.TemporaryDirectory() as folder, start_compiler(replicas) as processor:
        inputs = pathlib.Path(folder) / "inputs.npz"
        write_inputs(inputs, step, batches, reference)
        found = processor.run(step.serialized, inputs, step.module.updates, steps)
    return differences(config, step, reference, found)


def _tell(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
