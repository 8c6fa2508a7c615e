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
from collections.abc import Callable, Sequence
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
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import hlo, xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

# Autotuning would run kernels on a GPU.
_GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}


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
    """Compiles a module for all cores of a TPU.

    Args:
      name: of the topology.
      module: file of a serialized HLO module.
    """
    devices = _tpu_devices(name)
    start = time.perf_counter()
    try:
        program = _compile(pathlib.Path(module).read_bytes(), devices)
    except Exception as error:  # as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    costs = program.cost_analysis()
    return {
        "seconds": seconds,
        "memory": _memory(program),
        "flops": costs["flops"],
        "bytes": costs["bytes accessed"],
    }


def compile_for_gpus(
    target: str, hosts: int, gpus: int, cuda: str, module: str, optimized: str
) -> dict[str, Any]:
    """Compiles a module for all GPUs of some hosts.

    Args:
      target: the kind of GPU, as text of a ``GpuTargetConfigProto``.
      hosts: their number.
      gpus: in each host.
      cuda: folder with ``bin/ptxas`` and ``nvvm/libdevice``.
      module: file of a serialized HLO module.
      optimized: file for the optimized module.
    """
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"{hosts}x{gpus}x1", target_config=target
    ).devices
    content = pathlib.Path(module).read_bytes()
    start = time.perf_counter()
    try:
        program = _compile(content, devices, cuda)
    except Exception as error:  # as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    (compiled,) = program.hlo_modules()
    pathlib.Path(optimized).write_bytes(compiled.as_serialized_hlo_module_proto())
    # The executable has no cost analysis.
    lowered = hlo.HloModule.from_serialized_hlo_module_proto(content)
    costs = xla_client._xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, lowered)
    return {"seconds": seconds, "memory": _memory(program), "flops": costs["flops"], "bytes": 0}


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
    program = _compile(pathlib.Path(module).read_bytes(), devices)
    with np.load(inputs) as archive:
        given = dict(archive)
    batches, start, expected = (
        {int(name[len(kind) :]): array for name, array in given.items() if name.startswith(kind)}
        for kind in ("batch_", "value_", "expected_")
    )
    values = {number: _on_each([array] * len(devices), devices) for number, array in start.items()}
    for step in range(steps):
        for number, array in batches.items():
            values[number] = _on_each(array[step], devices)
        arguments = [values[number] for number in range(len(values))]
        results = program.execute_sharded(arguments).disassemble_into_single_device_arrays()
        for result, number in updates.items():
            values[number] = _joined(results[int(result)], devices)
    return {
        str(number): _distance(start[number], _parts(values[number]), target)
        for number, target in expected.items()
    }


def _on_each(parts: Sequence[np.ndarray], devices: list[Any]) -> jax.Array:
    """Returns an array with a different part on each device."""
    # Copies, because the program may overwrite its inputs.
    copies = [jax.device_put(np.array(part), device) for part, device in zip(parts, devices)]
    return _joined(copies, devices)


def _joined(parts: list[jax.Array], devices: list[Any]) -> jax.Array:
    """Combines the devices' arrays into one, which is the form that programs accept.

    It is declared as replicated, although the parts may differ: jax does not check that.
    """
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("replica",)), jax.sharding.PartitionSpec()
    )
    return jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, parts)


def _parts(whole: jax.Array) -> np.ndarray:
    """Returns the arrays of all devices, [devices, ...]."""
    return np.stack([np.asarray(shard.data) for shard in whole.addressable_shards])


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


def _compile(module: bytes, devices: list[Any], cuda: str = "") -> Any:
    """Compiles a module for one replica on each device.

    Args:
      module: serialized HLO module.
      devices: of one topology.
      cuda: folder with CUDA's tools, for GPUs.
    """
    client, replicas = devices[0].client, len(devices)
    numbers = np.array([[device.id] for device in devices])
    with mlir.make_ir_context():
        stablehlo = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(module))
        _remove_copies(stablehlo)
        options = compiler.get_compile_options(
            replicas,
            1,
            device_assignment=numbers,
            backend=client,
            env_options_overrides=dict(_GPU_OPTIONS) if cuda else None,
        )
        if cuda:
            options.executable_build_options.debug_options.xla_gpu_cuda_data_dir = cuda
        return compiler.backend_compile_and_load(
            client, stablehlo, xla_client.DeviceList(tuple(devices)), options, []
        )


def _memory(program: Any) -> dict[str, int]:
    """Returns the bytes that a program needs on a device, by purpose."""
    found = program.get_compiled_memory_stats()
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "shared": found.alias_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


def _remove_copies(stablehlo: ir.Module) -> None:
    """Removes copies, in which TensorFlow returns variables and which StableHLO does not have."""
    copies = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "mhlo.copy":
            operation.results[0].replace_all_uses_with(operation.operands[0])
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    stablehlo.operation.walk(visit)
    for operation in copies:
        operation.erase()


_WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "start": dict,
    "topology": topology,
    "compile_for_tpu": compile_for_tpu,
    "compile_for_gpus": compile_for_gpus,
    "run_steps": run_steps,
}

if __name__ == "__main__":
    main()
