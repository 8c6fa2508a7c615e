"""Lowers training steps of one GPU, to run them on a machine that has jax and no TensorFlow.

    python tools/gpu_steps/export.py --output_dir=runs/gpu_steps

needs the environment of `imagenet-fast compile`. It writes an HLO module for each step and
steps.json, which has what `run.py` needs to know of them and what the compiler, without a GPU, and
the planner predict.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from steps import COMPARED, GPU, STEPS, small

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.lab.xla_compile.compiler import Compiler, require_packages, start_compiler


def main(arguments: Sequence[str]) -> int:
    """Writes the steps."""
    parser = argparse.ArgumentParser(
        "export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help=f"(default: all of {', '.join(STEPS)})")
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    given = parser.parse_args(arguments)
    for name in given.steps:
        if name not in STEPS:
            parser.error(f"there is no step {name!r}; there are {', '.join(STEPS)}")
    directory = given.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    import_tensorflow()
    path = directory / "steps.json"
    described = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    described["packages"] = require_packages("GPU")
    with start_compiler("GPU") as compiler:
        for name in given.steps or STEPS:
            step = lowered(STEPS[name], directory / f"{name}.hlo")
            step["predicted"] = predicted(directory / f"{name}.hlo", compiler)
            described["steps"][name] = step
            for precision in ("float32", STEPS[name].precision) if name in COMPARED else ():
                other = f"{name}_small_{precision}"
                config = small(STEPS[name]).replace(precision=precision)
                described["steps"][other] = lowered(config, directory / f"{other}.hlo")
            path.write_text(json.dumps(described, indent=1))
    return 0


def lowered(config: Config, path: pathlib.Path) -> dict[str, Any]:
    """Writes the module of a training step and returns its description."""
    from imagenet_fast.distribute.virtual import VirtualGPUStrategy
    from imagenet_fast.lab.xla_compile.gpus import gpu_topology
    from imagenet_fast.lab.xla_compile.lower import lower_step
    from imagenet_fast.training.build.model import build_model

    topology = gpu_topology(GPU)
    assert topology is not None
    model = build_model(config, VirtualGPUStrategy(topology.coordinates))
    step = lower_step(model, config.batch_size, config.image_size)
    path.write_bytes(step.serialized)
    parameters = [
        {"dtype": array.dtype, "shape": array.shape, **_initial(argument)}
        for array, argument in zip(step.module.parameters, step.arguments)
    ]
    return {
        "options": config.differences(Config(), all_options=False),
        "images": config.batch_size,
        "image_size": config.image_size,
        "classes": len(model.labels),
        "parameters": parameters,
        "updates": step.module.updates,
    }


def _initial(argument: Any) -> dict[str, Any]:
    """Returns how to make the values of a parameter of a module."""
    if isinstance(argument, str):
        return {"kind": argument}
    values = np.asarray(argument)
    if values.size <= 64:
        return {"kind": "value", "value": values.tolist()}
    return {"kind": "random", "mean": float(values.mean()), "deviation": float(values.std())}


def predicted(path: pathlib.Path, compiler: Compiler) -> dict[str, Any]:
    """Returns what XLA's compiler, without a GPU, says of a module."""
    program = compiler.compile(compiler.topology(GPU), path.read_bytes())
    return {"peak": program.peak, "memory": dict(program.memory), "flops": program.flops}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"export.py: error: {error}")
