"""The fast 16-bit dtypes of NVIDIA GPUs, by compute capability.

Source: NVIDIA's CUDA C++ Programming Guide, the sections on compute capabilities for Tensor Cores,
and the table of the throughput of native arithmetic instructions for older GPUs. Results per clock
cycle and multiprocessor in float32 and float16: 64 and 128 for 6.0 (P100), 128 and 2 for 6.1 (P40),
128 and 256 for 5.3 and 6.2; none in float16 before. A capability is (major, minor); empty: it is
unknown, or there is no GPU.
"""

from __future__ import annotations

# The first capability with Tensor Cores for the dtype. Those of 7.0 (V100) have float16 only.
_TENSOR_CORES = {"float16": (7, 0), "bfloat16": (8, 0)}
_FLOAT16_SPEEDS: dict[tuple[int, ...], float] = {
    (5, 3): 256 / 128,
    (6, 0): 128 / 64,
    (6, 1): 2 / 128,
    (6, 2): 256 / 128,
}


def has_tensor_cores(dtype: str, capability: tuple[int, ...]) -> bool:
    """Whether a GPU has Tensor Cores for ``float16`` or ``bfloat16``.

    Args:
      dtype: the dtype.
      capability: (major, minor); empty: unknown, or no GPU.
    """
    return capability >= _TENSOR_CORES[dtype]


def float16_speed(capability: tuple[int, ...]) -> float:
    """Returns the speed of float16 arithmetic without Tensor Cores, relative to float32."""
    return _FLOAT16_SPEEDS.get(capability, 0.0)


def precision_instead_of(dtype: str, capability: tuple[int, ...]) -> str:
    """Returns the mixed-precision policy to use on a GPU on which ``dtype`` is slow.

    Args:
      dtype: ``float16`` or ``bfloat16``.
      capability: (major, minor); empty: unknown.
    """
    fast = has_tensor_cores("float16", capability) or float16_speed(capability) > 1
    return "mixed_float16" if dtype == "bfloat16" and fast else "float32"
