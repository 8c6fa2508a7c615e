"""Checks of a training step compiled for GPUs: the types it computes in, and its all-reduces."""

from __future__ import annotations

import collections

from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.gpu_arithmetic import has_tensor_cores, precision_instead_of
from imagenet_fast.lab.xla_compile.check import COMPUTE, Check, type_counts
from imagenet_fast.lab.xla_compile.check_all_reduces import groups_text, ordered
from imagenet_fast.lab.xla_compile.gpus import Gpu
from imagenet_fast.lab.xla_compile.module import ALL_REDUCES, Groups, Instruction, Module

# Prefixes of the targets of cuDNN and cuBLAS calls.
_CONVOLUTION, _PRODUCT = "__cudnn$conv", "__cublas$"
# Bytes of an element, if not 4.
_BYTES = {"bf16": 2, "f16": 2, "f64": 8, "s64": 8}
# In the name of an instruction that XLA recomputes to save memory.
_RECOMPUTED = ".remat"


def check_compiled(
    optimized: Module, lowered: Module, options: SharedOptions, gpu: Gpu, replicas: int
) -> list[Check]:
    """Checks the arithmetic and the all-reduces of the compiled step, ``optimized``."""
    convolutions = _instructions(optimized, "convolution", _CONVOLUTION)
    # The last layer's products: XLA may split and pad them, so only their source identifies them.
    products = _instructions(lowered, "dot", _PRODUCT)
    intended = {instruction.source for instruction in products if _is_float32(instruction)}
    products = _instructions(optimized, "dot", _PRODUCT)
    others = [instruction for instruction in products if instruction.source not in intended]
    checks = [
        Check(
            name,
            type_counts(instruction.operands[0].dtype for instruction in found),
            _in_float32(checked, name, options.precision, gpu),
        )
        for name, found, checked in (
            ("convolutions", convolutions, convolutions),
            ("matrix products", products, others),
        )
    ]
    return [*checks, _all_reduces(optimized, lowered, replicas)]


def _instructions(module: Module, opcode: str, target: str) -> list[Instruction]:
    """Returns the instructions with an opcode, and the libraries' calls in place of some."""
    calls = [each for each in module.instructions if each.target.startswith(target)]
    return [*module.of(opcode), *calls]


def _in_float32(checked: list[Instruction], name: str, precision: str, gpu: Gpu) -> str:
    """Returns what is wrong if instructions compute in float32 that should not."""
    wrong = [instruction for instruction in checked if _is_float32(instruction)]
    if not wrong or precision == "float32":
        return ""
    message = f"XLA computes {len(wrong)} of the {name} in float32 under {precision}"
    if COMPUTE[precision] == "bf16" and not has_tensor_cores("bfloat16", gpu.capability):
        major, minor = gpu.capability
        message += (
            f": {gpu.title} (compute capability {major}.{minor}) has no bfloat16 arithmetic, which "
            "begins with 8.0; use --precision="
            f"{precision_instead_of('bfloat16', gpu.capability)}"
        )
    return message


def _all_reduces(optimized: Module, lowered: Module, replicas: int) -> Check:
    """Compares only groups: XLA combines some all-reduces and removes duplicates."""
    found, intended = optimized.of(*ALL_REDUCES), lowered.of(*ALL_REDUCES)
    numbers: collections.Counter[str] = collections.Counter()
    for instruction in found:
        for array in instruction.operands:
            numbers[array.dtype] += array.elements
    mib = sum(count * _BYTES.get(dtype, 4) for dtype, count in numbers.items()) / 2**20
    counts = ", ".join(f"{count:,} numbers of {dtype}" for dtype, count in numbers.items())
    groups, expected = (
        {ordered(instruction.groups or [range(replicas)]) for instruction in instructions}
        for instructions in (found, intended)
    )
    # XLA may merge two in a row, as along the axes of a torus.
    joined = {
        _join(instruction.before, instruction.groups)
        for instruction in intended
        if instruction.before
    }
    among = " and ".join(groups_text(each) for each in sorted(groups))
    wrong = ""
    if groups - expected - joined or (expected - groups and not groups & joined):
        wanted = " and ".join(groups_text(each) for each in sorted(expected)) or "nobody"
        wrong = f"the step has all-reduces among {wanted}"
    text = f"{len(found)} of {counts}, {mib:,.1f} MiB, among {among}" if found else "none"
    return Check("all-reduces", text, wrong)


def _join(one: Groups, other: Groups) -> Groups:
    """Returns the connected components of both groupings together."""
    sets: list[set[int]] = []
    for group in (*one, *other):
        touching = [joined for joined in sets if joined & set(group)]
        sets = [joined for joined in sets if joined not in touching]
        sets.append(set(group).union(*touching))
    return ordered(sets)


def computed_twice(optimized: Module) -> int:
    """Returns the number of operations that XLA recomputes to save memory."""
    return sum(_RECOMPUTED in instruction.name for instruction in optimized.instructions)


def _is_float32(instruction: Instruction) -> bool:
    return instruction.operands[0].dtype == "f32"
