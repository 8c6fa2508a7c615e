"""What XLA made of a training step for GPUs: the types it computes in, and its all-reduces."""

from __future__ import annotations

import collections

from imagenet_fast.config import Config
from imagenet_fast.distribute.gpu_arithmetic import has_tensor_cores, precision_instead_of
from imagenet_fast.xla_compile.check import COMPUTE, Check
from imagenet_fast.xla_compile.check_sums import groups_told, ordered
from imagenet_fast.xla_compile.gpus import Gpu
from imagenet_fast.xla_compile.module import ALL_REDUCES, Groups, Instruction, Module

# Calls of cuDNN and cuBLAS, by how their targets begin.
_CONVOLUTION, _PRODUCT = "__cudnn$conv", "__cublas$"
# Of an element, where it is not 4.
_BYTES = {"bf16": 2, "f16": 2, "f64": 8, "s64": 8}
# XLA's name for an instruction that it computes a second time to save memory.
_AGAIN = ".remat"


def check_compiled(
    optimized: Module, lowered: Module, config: Config, gpu: Gpu, replicas: int
) -> list[Check]:
    """Returns what the compiled step computes and sums, and whether it is as it should be.

    Args:
      optimized: what XLA made of the step.
      lowered: the step.
      config: of the run.
      gpu: for which it is compiled.
      replicas: how many there are.
    """
    return [
        _convolutions(optimized, config, gpu),
        _products(optimized, lowered, config, gpu),
        _all_reduces(optimized, lowered, replicas),
    ]


def _convolutions(module: Module, config: Config, gpu: Gpu) -> Check:
    found = [
        *module.of("convolution"),
        *(own for own in module.instructions if own.target.startswith(_CONVOLUTION)),
    ]
    wrong = [own for own in found if _is_float32(own) and config.precision != "float32"]
    return Check("convolutions", _types(found), _in_float32(wrong, "convolutions", config, gpu))


def _products(optimized: Module, lowered: Module, config: Config, gpu: Gpu) -> Check:
    found = _all_products(optimized)
    # The last layer's: XLA may cut and pad them, so that only where they come from is left.
    meant = {own.source for own in _all_products(lowered) if _is_float32(own)}
    wrong = [
        own
        for own in found
        if _is_float32(own) and config.precision != "float32" and own.source not in meant
    ]
    return Check(
        "matrix products", _types(found), _in_float32(wrong, "matrix products", config, gpu)
    )


def _all_products(module: Module) -> list[Instruction]:
    return [
        *module.of("dot"),
        *(own for own in module.instructions if own.target.startswith(_PRODUCT)),
    ]


def _in_float32(wrong: list[Instruction], name: str, config: Config, gpu: Gpu) -> str:
    if not wrong:
        return ""
    told = f"XLA computes {len(wrong)} of the {name} in float32 under {config.precision}"
    if COMPUTE[config.precision] == "bf16" and not has_tensor_cores("bfloat16", gpu.capability):
        major, minor = gpu.capability
        told += (
            f": {gpu.title} (compute capability {major}.{minor}) has no bfloat16 arithmetic, which "
            "begins with 8.0; use --precision="
            f"{precision_instead_of('bfloat16', gpu.capability)}"
        )
    return told


def _all_reduces(optimized: Module, lowered: Module, replicas: int) -> Check:
    """Compares groups alone: XLA joins some all-reduces and drops those that are made twice."""
    found, meant = optimized.of(*ALL_REDUCES), lowered.of(*ALL_REDUCES)
    numbers: collections.Counter[str] = collections.Counter()
    for own in found:
        for array in own.operands:
            numbers[array.dtype] += array.elements
    mib = sum(count * _BYTES.get(dtype, 4) for dtype, count in numbers.items()) / 2**20
    told = ", ".join(f"{count:,} numbers of {dtype}" for dtype, count in numbers.items())
    groups, expected = (
        {ordered(own.groups or [range(replicas)]) for own in instructions}
        for instructions in (found, meant)
    )
    # Of two in a row, as along a torus' axes, XLA may make one.
    joined = {_join(own.before, own.groups) for own in meant if own.before}
    among = " and ".join(groups_told(own) for own in sorted(groups))
    wrong = ""
    if groups - expected - joined or (expected - groups and not groups & joined):
        wanted = " and ".join(groups_told(own) for own in sorted(expected)) or "nobody"
        wrong = f"the step has all-reduces among {wanted}"
    told = f"{len(found)} of {told}, {mib:,.1f} MiB, among {among}" if found else "none"
    return Check("all-reduces", told, wrong)


def _join(one: Groups, other: Groups) -> Groups:
    """Returns the groups of those that are together, over others, in either of both."""
    sets: list[set[int]] = []
    for group in (*one, *other):
        touching = [own for own in sets if own & set(group)]
        sets = [own for own in sets if own not in touching]
        sets.append(set(group).union(*touching))
    return ordered(sets)


def computed_twice(optimized: Module) -> int:
    """Returns how many operations XLA computes a second time to save memory."""
    return sum(_AGAIN in own.name for own in optimized.instructions)


def _is_float32(own: Instruction) -> bool:
    return own.operands[0].dtype == "f32"


def _types(found: list[Instruction]) -> str:
    counts = collections.Counter(own.operands[0].dtype for own in found)
    return ", ".join(f"{count:,} of {kind}" for kind, count in counts.most_common()) or "none"
