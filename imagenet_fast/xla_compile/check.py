"""Whether a training step, as it was lowered, is what its recipe says: shapes and types."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import NamedTuple

from imagenet_fast.config import Config
from imagenet_fast.xla_compile.lower import LoweredStep
from imagenet_fast.xla_compile.module import Instruction, Module

# Names in messages; the number of all is told with them.
_NAMED = 3
COMPUTE = {"float32": "f32", "mixed_bfloat16": "bf16", "mixed_float16": "f16"}
# As all networks name it; operations have the names of their layers in theirs.
_LAST_LAYER = "logits"
_FLOATS = ("f64", "f32", "f16", "bf16")


class Check(NamedTuple):
    """What was found of one kind.

    Attributes:
      name: of the kind.
      found: what there is.
      wrong: what is not as the recipe says; empty: nothing.
    """

    name: str
    found: str
    wrong: str = ""


def check_types(step: LoweredStep, config: Config, batch: int, classes: int) -> list[Check]:
    """Returns what there is of shapes and types, and whether it is as it should be.

    Args:
      step: the training step.
      config: of the run.
      batch: images that a replica computes with at once.
      classes: that the network tells apart.
    """
    module, compute = step.module, COMPUTE[config.precision]
    # Muon multiplies matrices in bfloat16, whatever the network computes in.
    further = {"bf16"} if config.optimizer == "muon" else set()
    return [
        _shapes(module),
        _inputs(
            "convolutions",
            module.of("convolution"),
            lambda own, dtype: dtype == compute or dtype in further,
            f"take other inputs than {compute}",
        ),
        _inputs(
            "matrix products",
            module.of("dot"),
            lambda own, dtype: (
                dtype == ("f32" if _is_last_layer(own) else compute) or dtype in further
            ),
            f"take other inputs than {compute}, or f32 in the last layer",
        ),
        _loss(module, (batch, classes)),
        _updates(step),
        _doubles(module),
    ]


def _shapes(module: Module) -> Check:
    dynamic = [own for own in module.instructions if own.is_dynamic]
    found = f"{len(module.instructions):,} instructions"
    return Check("shapes", found, f"only bounds of {_names(dynamic)}" if dynamic else "")


def _inputs(
    name: str,
    instructions: list[Instruction],
    allowed: Callable[[Instruction, str], bool],
    otherwise: str,
) -> Check:
    """Returns the types of what instructions take."""
    wrong = [
        own for own in instructions if not all(allowed(own, each.dtype) for each in own.operands)
    ]
    found = _counts(own.operands[0].dtype for own in instructions)
    return Check(name, found, f"{_names(wrong)} {otherwise}" if wrong else "")


def _loss(module: Module, shape: tuple[int, ...]) -> Check:
    """Returns the types of the softmax."""
    exponentials = [own for own in module.of("exponential") if own.arrays[0].shape == shape]
    other = [own for own in exponentials if own.arrays[0].dtype != "f32"]
    wrong = "" if exponentials else f"no softmax of {shape[0]} images and {shape[1]} classes"
    if other:
        wrong = f"{_names(other)} is not in f32"
    return Check("loss", _counts(own.arrays[0].dtype for own in exponentials), wrong)


def _updates(step: LoweredStep) -> Check:
    """Returns the types of the variables that the step changes."""
    changed = [
        (step.module.results[result], step.arguments[parameter])
        for result, parameter in step.module.updates.items()
    ]
    floats = [(array, own) for array, own in changed if array.dtype in _FLOATS]
    other = [own.name for array, own in floats if array.dtype != "f32"]
    wrong = f"{_some(other)} not in f32" if other else ""
    if not floats:
        wrong = "no variable changes"
    return Check("variables changed", _counts(array.dtype for array, _ in changed), wrong)


def _doubles(module: Module) -> Check:
    doubles = [
        own for own in module.instructions if any(array.dtype == "f64" for array in own.arrays)
    ]
    wrong = f"{_names(doubles)}: accelerators lack it, or compute it slowly" if doubles else ""
    return Check("float64", str(len(doubles) or "none"), wrong)


def _is_last_layer(own: Instruction) -> bool:
    """Whether it is made for the last layer, forward or backward: shapes may be others', too."""
    return _LAST_LAYER in own.source.split("/")


def _counts(kinds: Iterable[str]) -> str:
    counts = collections.Counter(kinds)
    return ", ".join(f"{count:,} of {kind}" for kind, count in counts.most_common()) or "none"


def _names(instructions: list[Instruction]) -> str:
    return _some([own.source or own.name for own in instructions])


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
