"""Runs the steps of `export.py` on this machine's first GPU, with jax and without TensorFlow.

    PYTHONPATH=. python3 tools/gpu_steps/run.py --steps=runs/gpu_steps --output_dir=results

measures each step's time and memory, and compares small steps with the same program on the
processor. Each step has a process of its own. results.json has the numbers; a step that is already
in it is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import numpy as np

from imagenet_fast.lab.xla_compile.executable import (
    compile_module,
    execute,
    joined,
    memory,
    on_each,
    parts_of,
)

TURNS, STEPS_IN_A_TURN = 10, 10
_PERTURBATION = 1e-7
_TYPES = {"f32": "float32", "f16": "float16", "s64": "int64", "s32": "int32", "u8": "uint8"}
_TYPES |= {"u32": "uint32", "u64": "uint64", "pred": "bool", "f64": "float64", "s8": "int8"}


def main(arguments: Sequence[str]) -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(
        "run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of steps (default: all)")
    parser.add_argument("--steps", type=pathlib.Path, required=True, help="folder of export.py")
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--in_this_process", action="store_true", help="print one step's result")
    given = parser.parse_args(arguments)
    described = json.loads((given.steps / "steps.json").read_text())["steps"]
    if given.in_this_process:
        (name,) = given.names
        measure = compared if "_small_" in name else timed
        print(json.dumps(measure(described[name], given.steps / f"{name}.hlo")))
        return 0

    given.output_dir.mkdir(parents=True, exist_ok=True)
    path = given.output_dir / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in given.names or described:
        if name in results:
            continue
        start = time.perf_counter()
        results[name] = _in_a_process(name, given.steps)
        text = json.dumps(results[name])
        print(f"{name}: {time.perf_counter() - start:.0f} s: {text[:400]}", flush=True)
        path.write_text(json.dumps(results, indent=1))
    return 0


def _in_a_process(name: str, steps: pathlib.Path) -> dict[str, Any]:
    command = [sys.executable, __file__, name, f"--steps={steps}", "--output_dir=."]
    environment = dict(os.environ)
    if name.endswith("_small_float32"):
        environment["NVIDIA_TF32_OVERRIDE"] = "0"  # a processor has no TensorFloat-32
    done = subprocess.run(
        [*command, "--in_this_process"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def timed(step: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Returns the seconds and the memory of a step."""
    devices = jax.devices()[:1]
    start = time.perf_counter()
    program = compile_module(path.read_bytes(), devices)
    result = {"compile_seconds": time.perf_counter() - start, "memory": memory(program)}
    values = [on_each([array], devices) for array in initial(step)]
    before = devices[0].memory_stats() or {}
    seconds = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        for _ in range(STEPS_IN_A_TURN):
            values = _next(program, step, values, devices)
        jax.block_until_ready(values)
        seconds.append((time.perf_counter() - start) / STEPS_IN_A_TURN)
    stats = devices[0].memory_stats() or {}
    return {
        **result,
        "seconds": {
            "median": statistics.median(seconds[1:]),
            "min": min(seconds[1:]),
            "max": max(seconds[1:]),
        },
        "steps": TURNS * STEPS_IN_A_TURN,
        "finite": all(np.isfinite(np.asarray(value, np.float64)).all() for value in values),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "peak_bytes_of_compilation": before.get("peak_bytes_in_use"),
        "device": devices[0].device_kind,
        "platform": devices[0].client.platform_version,
        "jax": jax.__version__,
    }


def compared(step: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Compares the variables after a step on the GPU with those after one on the processor.

    Returns:
      ``difference``, relative to the change in the step; ``perturbed``, the same for the processor
      itself with initial weights that are different by ``_PERTURBATION`` of each; and ``moved``,
      the change relative to the initial values.
    """
    given = initial(step)
    random = np.random.default_rng(1)
    changed = [
        number
        for number in step["updates"].values()
        if step["parameters"][number]["kind"] == "random"
    ]
    perturbed = list(given)
    for number in changed:
        noise = random.normal(1, _PERTURBATION, given[number].shape)
        perturbed[number] = (given[number] * noise).astype(given[number].dtype)
    processor, gpu = jax.devices("cpu")[:1], jax.devices()[:1]
    expected = _after(step, path, given, processor)
    found = {
        "difference": _after(step, path, given, gpu),
        "perturbed": _after(step, path, perturbed, processor),
    }

    def distance(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
        squares = [np.square(some[n].astype(np.float64) - others[n]).sum() for n in changed]
        return float(np.sqrt(sum(squares)))

    way = distance(expected, given)
    return {
        **{name: distance(values, expected) / way for name, values in found.items()},
        "moved": way / distance(given, [np.zeros_like(array) for array in given]),
        "device": gpu[0].device_kind,
        "tf32": os.environ.get("NVIDIA_TF32_OVERRIDE") != "0",
    }


def _after(
    step: dict[str, Any], path: pathlib.Path, given: Sequence[np.ndarray], devices: Sequence[Any]
) -> list[np.ndarray]:
    """Returns the values of all parameters after a step."""
    program = compile_module(path.read_bytes(), devices)
    values = [on_each([array], devices) for array in given]
    return [parts_of(value)[0] for value in _next(program, step, values, devices)]


def initial(step: dict[str, Any]) -> list[np.ndarray]:
    """Returns random images and labels, and variables like those of a new network."""
    random = np.random.default_rng(0)
    values = []
    for parameter in step["parameters"]:
        shape, dtype = parameter["shape"], _TYPES[parameter["dtype"]]
        kind = parameter["kind"]
        if kind == "images":
            array = random.integers(0, 256, shape)
        elif kind == "labels":
            array = random.integers(0, step["classes"], shape)
        elif kind == "weights":
            array = np.ones(shape)
        elif kind == "value":
            array = np.array(parameter["value"]).reshape(shape)
        else:
            array = random.normal(parameter["mean"], parameter["deviation"], shape)
        values.append(array.astype(dtype))
    return values


def _next(
    program: Any, step: dict[str, Any], values: list[jax.Array], devices: Sequence[Any]
) -> list[jax.Array]:
    """Returns the parameters of the next step, with the same images."""
    results = execute(program, values)
    values = list(values)
    for result, number in step["updates"].items():
        values[number] = joined(results[int(result)], devices)
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
