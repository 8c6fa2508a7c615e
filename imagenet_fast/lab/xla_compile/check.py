"""Checks of a lowered training step's shapes and types against its options."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import NamedTuple

from imagenet_fast.lab.xla_compile.lower import LoweredStep
from imagenet_fast.lab.xla_compile.module import Instruction, Module
from imagenet_fast.optimizers.options import OptimizerOptions
from imagenet_fast.training.build.selection import selected_images

# Names that a message lists before it counts the rest.
_NAMED = 3
COMPUTE = {"float32": "f32", "mixed_bfloat16": "bf16", "mixed_float16": "f16"}
# Scopes of the last layer, which has this name in all networks: Keras 3 opens them twice, and
# TensorFlow numbers the second.
_LAST_LAYER = {"logits", "logits_1"}
_FLOATS = ("f64", "f32", "f16", "bf16")


class Check(NamedTuple):
    """The result of one check.

    Attributes:
      name: what is checked.
      found: what the step contains.
      wrong: how it differs from the options; empty: it does not.
    """

    name: str
    found: str
    wrong: str = ""


def check_types(
    step: LoweredStep, options: OptimizerOptions, images: int, classes: int, custom: bool = False
) -> list[Check]:
    """Checks the shapes and types of a step.

    A replica has ``images`` in a step. Layers of a ``custom`` network, the user's own, may compute
    in any precision.
    """
    module, compute = step.module, COMPUTE[options.precision]
    # Muon always multiplies matrices in bfloat16.
    also = {"bf16"} if options.optimizer == "muon" else set()
    return [
        _shapes(module),
        _inputs(
            "convolutions",
            module.of("convolution"),
            lambda instruction, dtype: custom or dtype == compute or dtype in also,
            f"take other inputs than {compute}",
        ),
        _inputs(
            "matrix products",
            module.of("dot"),
            lambda instruction, dtype: (
                custom
                or dtype == ("f32" if _is_last_layer(instruction) else compute)
                or dtype in also
            ),
            f"take other inputs than {compute}, or f32 in the last layer",
        ),
        _loss(module, [(count, classes) for count in _images_of_losses(options, images)]),
        _updates(step),
        _doubles(module),
    ]


def _shapes(module: Module) -> Check:
    dynamic = [instruction for instruction in module.instructions if instruction.is_dynamic]
    found = f"{len(module.instructions):,} instructions"
    return Check("shapes", found, f"only bounds of {_names(dynamic)}" if dynamic else "")


def _inputs(
    name: str,
    instructions: list[Instruction],
    allowed: Callable[[Instruction, str], bool],
    otherwise: str,
) -> Check:
    """Checks the types of instructions' inputs."""
    wrong = [
        instruction
        for instruction in instructions
        if not all(allowed(instruction, each.dtype) for each in instruction.operands)
    ]
    found = type_counts(instruction.operands[0].dtype for instruction in instructions)
    return Check(name, found, f"{_names(wrong)} {otherwise}" if wrong else "")


def _images_of_losses(options: OptimizerOptions, images: int) -> list[int]:
    """Returns the numbers of images in losses: a micro-batch, and those that are selected from."""
    trained = selected_images(options, images)
    return [trained // options.accumulation_steps, *([images] if trained < images else [])]


def _loss(module: Module, shapes: list[tuple[int, int]]) -> Check:
    """Checks the types of the softmaxes, or of the sigmoids."""
    exponentials = [
        instruction
        for instruction in module.of("exponential")
        if instruction.arrays[0].shape in shapes
    ]
    other = [instruction for instruction in exponentials if instruction.arrays[0].dtype != "f32"]
    found = {instruction.arrays[0].shape for instruction in exponentials}
    wrong = "; ".join(
        f"no loss of {images} images and {classes} classes"
        for images, classes in shapes
        if (images, classes) not in found
    )
    if other:
        wrong = f"{_names(other)} is not in f32"
    return Check(
        "loss", type_counts(instruction.arrays[0].dtype for instruction in exponentials), wrong
    )


def _updates(step: LoweredStep) -> Check:
    """Checks the types of the variables that the step updates."""
    changed = [
        (step.module.results[result], step.arguments[parameter])
        for result, parameter in step.module.updates.items()
    ]
    floats = [(array, variable) for array, variable in changed if array.dtype in _FLOATS]
    other = [variable.name for array, variable in floats if array.dtype != "f32"]
    wrong = f"{_some(other)} not in f32" if other else ""
    if not floats:
        wrong = "no variable changes"
    return Check("variables changed", type_counts(array.dtype for array, _ in changed), wrong)


def _doubles(module: Module) -> Check:
    doubles = [
        instruction
        for instruction in module.instructions
        if any(array.dtype == "f64" for array in instruction.arrays)
    ]
    wrong = f"{_names(doubles)}: accelerators lack it, or compute it slowly" if doubles else ""
    return Check("float64", str(len(doubles) or "none"), wrong)


def _is_last_layer(instruction: Instruction) -> bool:
    """Whether it belongs to the last layer, forward or backward; its shape would not be unique."""
    return not _LAST_LAYER.isdisjoint(instruction.source.split("/"))


def type_counts(dtypes: Iterable[str]) -> str:
    """Returns how often each type occurs, as text."""
    counts = collections.Counter(dtypes)
    return ", ".join(f"{count:,} of {dtype}" for dtype, count in counts.most_common()) or "none"


def _names(instructions: list[Instruction]) -> str:
    return _some([instruction.source or instruction.name for instruction in instructions])


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
