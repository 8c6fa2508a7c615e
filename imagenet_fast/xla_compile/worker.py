"""A process of its own for jax and libtpu, which share none with TensorFlow.

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
)

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies


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
        devices = _devices(name)
    except Exception as error:  # of libtpu, which has no type of its own for it
        return {"error": str(error)}
    return {
        "kind": devices[0].device_kind,
        "coordinates": [[*device.coords, device.core_on_chip] for device in devices],
    }


def compile_step(name: str, module: str) -> dict[str, Any]:
    """Compiles a module for all cores of a topology.

    Args:
      name: of the topology.
      module: file of a serialized HLO module.
    """
    devices = _devices(name)
    start = time.perf_counter()
    try:
        program = _compile(pathlib.Path(module).read_bytes(), devices)
    except Exception as error:  # as above
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    memory, costs = program.get_compiled_memory_stats(), program.cost_analysis()
    return {
        "seconds": seconds,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "shared": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "flops": costs["flops"],
        "bytes": costs["bytes accessed"],
    }


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


def _devices(name: str) -> list[Any]:
    # TensorFlow takes both cores of a v4 chip as one device; libtpu has to be told to.
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return list(found.devices)


def _compile(module: bytes, devices: list[Any]) -> Any:
    """Returns the module, compiled for a replica on each of the devices."""
    client, replicas = devices[0].client, len(devices)
    numbers = np.array([[device.id] for device in devices])
    with mlir.make_ir_context():
        stablehlo = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(module))
        _leave_out_copies(stablehlo)
        options = compiler.get_compile_options(
            replicas, 1, device_assignment=numbers, backend=client
        )
        return compiler.backend_compile_and_load(
            client, stablehlo, xla_client.DeviceList(tuple(devices)), options, []
        )


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
    "compile_step": compile_step,
    "run_steps": run_steps,
}

if __name__ == "__main__":
    main()
