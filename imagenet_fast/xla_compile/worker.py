"""A process of its own for jax, libtpu and the CUDA plugin, which share none with TensorFlow.

Asked by lines, answering each in JSON. A line is an object with ``do``, the name of one of the
functions of ``_WORK``, and its arguments. What the compiler refuses is an answer, too:
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

# Before jax is imported. Compiling for a TPU needs no accelerator, and no machine around one; and
# several processes may do it at the same time.
os.environ.update(
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
    JAX_ENABLE_X64="1",  # numbers of steps are int64
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v4-8",
    # Where XLA looks for CUDA's tools if it misses one: no other CUDA is to be used unnoticed.
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

# Autotuning runs kernels, for which there is no GPU.
_GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}


def main() -> None:
    """Answers until there are no more lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_WORK[job.pop("do")](**job)), file=answers, flush=True)


def topology(name: str) -> dict[str, Any]:
    """Returns the ``kind`` of a TPU's chips and the ``coordinates`` of its cores."""
    try:
        devices = _tpu_devices(name)
    except Exception as error:  # of libtpu, which has no type of its own for it
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
      hosts: how many.
      gpus: of each host.
      cuda: folder with ``bin/ptxas`` and ``nvvm/libdevice``.
      module: file of a serialized HLO module.
      optimized: file for the module that XLA makes of it.
    """
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"{hosts}x{gpus}x1", target_config=target
    ).devices
    content = pathlib.Path(module).read_bytes()
    start = time.perf_counter()
    try:
        program = _compile(content, devices, cuda)
    except Exception as error:  # of XLA's, as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    (own,) = program.hlo_modules()
    pathlib.Path(optimized).write_bytes(own.as_serialized_hlo_module_proto())
    # The executable tells none.
    lowered = hlo.HloModule.from_serialized_hlo_module_proto(content)
    costs = xla_client._xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, lowered)
    return {"seconds": seconds, "memory": _memory(program), "flops": costs["flops"], "bytes": 0}


def run_steps(
    module: str, inputs: str, updates: dict[str, int], steps: int
) -> dict[str, dict[str, float]]:
    """Takes steps on this machine's processor, each of whose virtual devices is a replica.

    Args:
      module: file of a serialized HLO module.
      inputs: NumPy archive, as ``compare.write_inputs`` has it.
      updates: the parameter that each result of the module takes the place of in the next step.
      steps: how many.

    Returns:
      By the number of each parameter for which there is something expected: ``most``, the greatest
      difference of a number from that; ``spread``, between replicas; and squared lengths: of the
      ``difference``, of the ``way`` to what is expected, and of the ``start``.
    """
    devices = jax.devices("cpu")
    program = _compile(pathlib.Path(module).read_bytes(), devices)
    with np.load(inputs) as archive:
        given = dict(archive)
    batches, start, expected = (
        {int(name[len(kind) :]): own for name, own in given.items() if name.startswith(kind)}
        for kind in ("batch_", "value_", "expected_")
    )
    values = {number: _on_each([own] * len(devices), devices) for number, own in start.items()}
    for step in range(steps):
        for number, own in batches.items():
            values[number] = _on_each(own[step], devices)
        arguments = [values[number] for number in range(len(values))]
        results = program.execute_sharded(arguments).disassemble_into_single_device_arrays()
        for result, number in updates.items():
            values[number] = _joined(results[int(result)], devices)
    return {
        str(number): _distance(start[number], _parts(values[number]), aim)
        for number, aim in expected.items()
    }


def _on_each(parts: Sequence[np.ndarray], devices: list[Any]) -> jax.Array:
    """Returns an array of which each device has its own part."""
    # Copies: the program may write into what it is given.
    copies = [jax.device_put(np.array(own), device) for own, device in zip(parts, devices)]
    return _joined(copies, devices)


def _joined(parts: list[jax.Array], devices: list[Any]) -> jax.Array:
    """Returns arrays of several devices as one, as programs take them.

    jax is told that they are the same, of which it makes no use here.
    """
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("replica",)), jax.sharding.PartitionSpec()
    )
    return jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, parts)


def _parts(whole: jax.Array) -> np.ndarray:
    """Returns what each device has, [devices, ...]."""
    return np.stack([np.asarray(shard.data) for shard in whole.addressable_shards])


def _distance(start: np.ndarray, found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Returns how far replicas, [replicas, ...], are from what is expected."""
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
    # TensorFlow takes both cores of a v4 chip as one device; libtpu has to be told to.
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return list(found.devices)


def _compile(module: bytes, devices: list[Any], cuda: str = "") -> Any:
    """Returns the module, compiled for a replica on each of the devices.

    Args:
      module: serialized HLO module.
      devices: of one topology.
      cuda: folder with CUDA's tools, for GPUs.
    """
    client, replicas = devices[0].client, len(devices)
    numbers = np.array([[device.id] for device in devices])
    with mlir.make_ir_context():
        stablehlo = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(module))
        _leave_out_copies(stablehlo)
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
    """Returns the bytes that a program needs of a device, by what for."""
    found = program.get_compiled_memory_stats()
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "shared": found.alias_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


def _leave_out_copies(stablehlo: ir.Module) -> None:
    """Takes out what StableHLO does not have: copies, in which TensorFlow returns variables."""
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
