"""HLO modules compiled and run by jax, on devices that exist or for those that do not.

Types of 64 bits must be enabled in jax, because step counters are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

# Autotuning would run kernels on a GPU.
_WITHOUT_GPU = {"xla_gpu_autotune_level": "0"}


def compile_module(module: bytes, devices: Sequence[Any], cuda: str = "") -> Any:
    """Compiles a serialized HLO module for one replica on each device of a topology.

    ``cuda`` is the folder with CUDA's tools, for GPUs that do not exist here.
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
            env_options_overrides=dict(_WITHOUT_GPU) if cuda else None,
        )
        if cuda:
            options.executable_build_options.debug_options.xla_gpu_cuda_data_dir = cuda
        return compiler.backend_compile_and_load(
            client, stablehlo, xla_client.DeviceList(tuple(devices)), options, []
        )


def memory(program: Any) -> dict[str, int]:
    """Returns the bytes that a program needs on a device, by purpose."""
    found = program.get_compiled_memory_stats()
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "shared": found.alias_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


def execute(program: Any, arguments: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Starts a program.

    Its arguments are arrays of :func:`joined`, which it may overwrite.

    Returns:
      For each result the array of each device.
    """
    return program.execute_sharded(arguments).disassemble_into_single_device_arrays()


def on_each(parts: Sequence[np.ndarray], devices: Sequence[Any]) -> jax.Array:
    """Returns an array with a different part on each device."""
    # Copies, because the program may overwrite its inputs.
    copies = [jax.device_put(np.array(part), device) for part, device in zip(parts, devices)]
    return joined(copies, devices)


def joined(parts: Sequence[jax.Array], devices: Sequence[Any]) -> jax.Array:
    """Combines the devices' arrays into one, which is the form that programs accept.

    It is declared as replicated, although the parts may differ: jax does not check that.
    """
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("replica",)), jax.sharding.PartitionSpec()
    )
    return jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, parts)


def parts_of(whole: jax.Array) -> np.ndarray:
    """Returns the arrays of all devices, [devices, ...]."""
    return np.stack([np.asarray(shard.data) for shard in whole.addressable_shards])


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
