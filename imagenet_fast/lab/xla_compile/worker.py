"""The worker process for jax, libtpu and the CUDA plugin, which cannot share one with TensorFlow.

It answers each line of its input with a line of JSON. A line is an object with ``do``, the name of
a function of ``_WORK``, and its arguments. If the compiler rejects a program, the answer is
``{"error": ...}``.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

# Set before jax is imported. Compiling for a TPU needs neither a TPU nor its host, and several
# processes may do it at the same time.
os.environ.update(
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
    JAX_ENABLE_X64="1",  # step counters are int64
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v4-8",
    # Where XLA looks for missing CUDA tools: it must not silently use another CUDA.
    PATH="",
)
os.environ.pop("CUDA_ROOT", None)

import jax
import numpy as np
from jax._src.lib import hlo, xla_client
from jax.experimental import topologies

from imagenet_fast.lab.xla_compile.executable import (
    compile_module,
    execute,
    joined,
    memory,
    on_each,
    parts_of,
)


def main() -> None:
    """Answers each line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the libraries' output out of the answers
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_WORK[job.pop("do")](**job)), file=answers, flush=True)


def topology(name: str) -> dict[str, Any]:
    """Returns the ``kind`` of a TPU's chips and the ``coordinates`` of its cores."""
    try:
        devices = _tpu_devices(name)
    except Exception as error:  # libtpu raises no specific type
        return {"error": str(error)}
    return {
        "kind": devices[0].device_kind,
        "coordinates": [[*device.coords, device.core_on_chip] for device in devices],
    }


def compile_for_tpu(name: str, module: str) -> dict[str, Any]:
    """Compiles a file of a serialized HLO module for all cores of a TPU."""
    devices = _tpu_devices(name)
    start = time.perf_counter()
    try:
        program = compile_module(pathlib.Path(module).read_bytes(), devices)
    except Exception as error:  # as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    costs = program.cost_analysis()
    return {
        "seconds": seconds,
        "memory": memory(program),
        "flops": costs["flops"],
        "bytes": costs["bytes accessed"],
    }


def compile_for_gpus(
    target: str, hosts: int, gpus: int, cuda: str, module: str, optimized: str
) -> dict[str, Any]:
    """Compiles a module for all GPUs of some hosts.

    ``target`` is the kind of GPU, as text of a ``GpuTargetConfigProto``, ``cuda`` the folder with
    ``bin/ptxas`` and ``nvvm/libdevice``. The module is read from a file, and the optimized one
    written.
    """
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"{hosts}x{gpus}x1", target_config=target
    ).devices
    content = pathlib.Path(module).read_bytes()
    start = time.perf_counter()
    try:
        program = compile_module(content, devices, cuda)
    except Exception as error:  # as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    (compiled,) = program.hlo_modules()
    pathlib.Path(optimized).write_bytes(compiled.as_serialized_hlo_module_proto())
    # The executable has no cost analysis.
    lowered = hlo.HloModule.from_serialized_hlo_module_proto(content)
    costs = xla_client._xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, lowered)
    return {"seconds": seconds, "memory": memory(program), "flops": costs["flops"], "bytes": 0}


def run_steps(
    module: str, inputs: str, updates: dict[str, int], steps: int
) -> dict[str, dict[str, float]]:
    """Runs steps on this machine's CPU, with a replica on each virtual device.

    Args:
      module: file of a serialized HLO module.
      inputs: NumPy archive written by ``compare.write_inputs``.
      updates: maps the module's results to the parameters that they replace in the next step.
      steps: their number.

    Returns:
      For each parameter with an expected value, by its number: ``most``, the largest difference of
      an element; ``spread``, the largest difference between replicas; and squared norms: of the
      ``difference``, of the ``way`` from start to expected value, and of the ``start``.
    """
    devices = jax.devices("cpu")
    program = compile_module(pathlib.Path(module).read_bytes(), devices)
    with np.load(inputs) as archive:
        given = dict(archive)
    batches, start, expected = (
        {int(name[len(kind) :]): array for name, array in given.items() if name.startswith(kind)}
        for kind in ("batch_", "value_", "expected_")
    )
    values = {number: on_each([array] * len(devices), devices) for number, array in start.items()}
    for step in range(steps):
        for number, array in batches.items():
            values[number] = on_each(array[step], devices)
        arguments = [values[number] for number in range(len(values))]
        results = execute(program, arguments)
        for result, number in updates.items():
            values[number] = joined(results[int(result)], devices)
    return {
        str(number): _distance(start[number], parts_of(values[number]), target)
        for number, target in expected.items()
    }


def _distance(start: np.ndarray, found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Returns the distance of replicas, [replicas, ...], from the expected value."""
    away = np.abs(found.astype(np.float64) - expected)
    squares = np.square(away).reshape(len(found), -1).sum(axis=1)
    return {
        "most": float(away.max()),
        "spread": float(np.ptp(found, axis=0).max()),
        "difference": float(squares.max()),
        "way": float(np.square(expected.astype(np.float64) - start).sum()),
        "start": float(np.square(start.astype(np.float64)).sum()),
    }


def _tpu_devices(name: str) -> list[Any]:
    # TensorFlow uses both cores of a v4 chip as one device; libtpu needs an option for that.
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return list(found.devices)


_WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "start": dict,
    "topology": topology,
    "compile_for_tpu": compile_for_tpu,
    "compile_for_gpus": compile_for_gpus,
    "run_steps": run_steps,
}

if __name__ == "__main__":
    main()
