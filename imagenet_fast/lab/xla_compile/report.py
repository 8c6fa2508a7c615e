"""The report of a compiled training step, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.distribute.gpu_arithmetic import float16_speed, has_tensor_cores
from imagenet_fast.lab.planning.compiled_memory import STEP_OPTIONS
from imagenet_fast.lab.xla_compile.compiler import Program
from imagenet_fast.lab.xla_compile.gpus import GpuTopology
from imagenet_fast.lab.xla_compile.recipe import Compilation, Trial

# Larger numbers would be written with an exponent.
_MAX_DIGITS = 999.5
_NAME_WIDTH = 24
NOT_PROVED = {
    "TPU": "That says nothing about its speed, the TPU's runtime or its interconnect: there was no "
    "TPU, and none has run it.",
    "GPU": "That says nothing about its speed, the algorithms that cuDNN and cuBLAS choose and "
    "their workspaces, TF32, NCCL, or TensorFlow without XLA: there was no GPU, and none has run "
    "it.",
}


def table(found: Compilation) -> str:
    """Returns the report as text."""
    config = found.config
    lines = [
        _line("topology", f"{found.topology.name}: {found.topology}"),
        _line(
            "network",
            f"{config.model}, {found.parameters:,} parameters, {config.precision}, "
            f"{config.optimizer}",
        ),
        _line(
            "batch",
            f"{config.batch_size:,} images of {config.image_size} px{_of_sizes(found)}, "
            f"{found.batch:,} a replica",
        ),
        "",
        *(_verdict(check.name, check.found, check.wrong) for check in found.checks),
        "",
        *_program_lines(found),
        *_tried_lines(found),
    ]
    if found.differences:
        lines += ["", f"{_steps(found.steps)} of the replicas, and of one device with all images:"]
    for difference in found.differences:
        differ = (
            f"differ by at most {difference.most:.2g}, {difference.share:.2g} of their change; "
            f"between replicas by {difference.spread:.2g}"
        )
        lines.append(_verdict(difference.kind, differ, difference.wrong))
    if not found.failure:
        lines += ["", _conclusion(found), _not_proved(found)]
    return "\n".join(lines)


def as_json(found: Compilation) -> str:
    """Returns the report as JSON."""
    program = found.program
    values = {
        "topology": {
            "name": found.topology.name,
            "kind": found.topology.kind,
            "replicas": len(found.topology.coordinates),
            "chips": found.topology.chips,
            "memory": found.topology.memory,
            "usable": found.topology.usable,
        },
        "parameters": found.parameters,
        "batch": found.batch,
        "checks": [check._asdict() for check in found.checks],
        "program": program and _program_values(found, program),
        "compiled": [check._asdict() for check in found.compiled],
        "fits": found.fits,
        "computed_twice": found.computed_twice,
        "batches": [trial._asdict() for trial in found.batches],
        "accumulations": [trial._asdict() for trial in found.accumulations],
        "failure": found.failure,
        "steps": found.steps,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
        "proves": "" if found.failure else f"{_conclusion(found)} {_not_proved(found)}",
        "options": {name: getattr(found.config, name) for name in ("batch_size", *STEP_OPTIONS)},
        "packages": found.packages,
        **environment.provenance(),
    }
    return json.dumps(values, indent=2) + "\n"


def write(found: Compilation, directory: str) -> list[str]:
    """Writes ``compile.json`` and ``compile.txt``, and returns their paths.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {"compile.json": as_json(found), "compile.txt": table(found) + "\n"}
    return write_results(directory, texts)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _conclusion(found: Compilation) -> str:
    _, _, size = found.topology.name.partition(":")
    with_what = "libtpu" if found.topology.platform == "TPU" else "jax-cuda12-pjrt"
    return (
        f"The training step compiles for {found.topology.kind} ({size}) with {with_what} "
        f"{found.packages[with_what]}."
    )


def _not_proved(found: Compilation) -> str:
    return NOT_PROVED[found.topology.platform]


def _of_sizes(found: Compilation) -> str:
    return ", the largest of the run" if found.config.sizes_until else ""


def _program_values(found: Compilation, program: Program) -> dict[str, object]:
    values = {
        field.name: getattr(program, field.name)
        for field in dataclasses.fields(program)
        if field.name != "optimized"
    }
    return {**values, "peak": program.peak, "per_image": _per_image(found, program)}


def _program_lines(found: Compilation) -> list[str]:
    program = found.program
    if program is None:
        return [_verdict("compiled", f"not for {found.topology.name}", found.refusal)]
    work = f"{_per_image(found, program) / 1e9:.3g} GFLOPs an image"
    if program.bytes:
        part = "step" if found.config.accumulation_steps == 1 else "micro-batch"
        work += f", and {program.bytes / 1e9:.3g} GB read and written in a {part} of a replica"
    return [
        _verdict("compiled", f"in {program.seconds:.0f} s"),
        *(_verdict(check.name, check.found, check.wrong) for check in found.compiled),
        _memory_line(found, program),
        _line("work", f"{work}, as XLA counts"),
        *_slow_float16(found),
    ]


def _slow_float16(found: Compilation) -> list[str]:
    """Returns a line if the GPU computes in float16 more slowly than in float32."""
    topology = found.topology
    if found.config.precision != "mixed_float16" or not isinstance(topology, GpuTopology):
        return []
    rate = float16_speed(topology.gpu.capability)
    if has_tensor_cores("float16", topology.gpu.capability) or rate >= 1:
        return []
    text = (
        f"{topology.kind} computes in it at 1/{1 / rate:.0f} of float32's speed, so only kernels "
        "that compute in float32 are fast: try --precision=float32, too"
    )
    return [_line("float16", text)]


def _memory_line(found: Compilation, program: Program) -> str:
    topology = found.topology
    memory = program.memory
    parts = {
        "arguments": memory["arguments"],
        "outputs besides these": memory["outputs"] - memory["shared"],
        "temporary": memory["temporary"],
        "code": memory["code"],
    }
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    limit = f" of {_size(topology.memory)}" if topology.memory else ""
    if not topology.usable:
        return _line("memory", f"{_size(program.peak)}{limit} of a replica: {sizes}")
    kept = topology.memory - topology.usable
    text = (
        f"{_size(program.peak)}{limit}, of which {_size(kept)} are kept for TensorFlow, CUDA and "
        f"workspaces: {sizes}"
    )
    if found.computed_twice:
        text += f"; to save it, {found.computed_twice:,} operations are computed twice"
    return _verdict("memory", text, "" if found.fits else "does not fit")


def _tried_lines(found: Compilation) -> list[str]:
    lines = []
    for head, tried in (
        ("images a GPU", found.batches),
        ("accumulation_steps", found.accumulations),
    ):
        if tried:
            lines += ["", f"{head:{_NAME_WIDTH}}memory     operations computed twice"]
        lines += [_line(f"{trial.size:,}", _tried(trial, found.topology.usable)) for trial in tried]
    if found.batches and found.batches[-1].fits(found.topology.usable):
        lines.append("Larger ones may fit, too: the search ends here.")
    return lines


def _tried(trial: Trial, usable: int) -> str:
    if trial.peak is None:
        return f"invalid: {trial.refusal}"
    text = f"{_size(trial.peak):11}{trial.computed_twice:<5}"
    return (text if trial.fits(usable) else f"{text}does not fit").rstrip()


def _size(number: float) -> str:
    """Returns bytes in the largest unit in which they are at least about 1."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < _MAX_DIGITS:
            return f"{number:.3g} {unit}"
        number /= 2**10
    return f"{number:.3g} GiB"


def _per_image(found: Compilation, program: Program) -> float:
    """Returns FLOPs per image. XLA counts the loop over accumulated micro-batches once."""
    return program.flops * found.config.accumulation_steps / found.batch


def _line(name: str, text: str) -> str:
    return f"{name:{_NAME_WIDTH}}{text}"


def _verdict(name: str, found: str, wrong: str = "") -> str:
    return _line(name, f"NO  {found}: {wrong}" if wrong else f"ok  {found}")
