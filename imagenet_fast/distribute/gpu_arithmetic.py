"""The types in which NVIDIA's GPUs compute fast, by compute capability.

By NVIDIA's CUDA C++ Programming Guide: its sections on compute capabilities for Tensor Cores, and
its table of the throughput of native arithmetic instructions for the others. A multiprocessor makes
these results a clock in float32 and in float16: 64 and 128 with 6.0 (P100), 128 and 2 with 6.1
(P40), 128 and 256 with 5.3 and 6.2; before that none in float16.
"""

from __future__ import annotations

# The first whose Tensor Cores take the type. Those of 7.0 (V100) take float16 alone.
_TENSOR_CORES = {"float16": (7, 0), "bfloat16": (8, 0)}
_FLOAT16_RATES: dict[tuple[int, ...], float] = {
    (5, 3): 256 / 128,
    (6, 0): 128 / 64,
    (6, 1): 2 / 128,
    (6, 2): 256 / 128,
}


def has_tensor_cores(dtype: str, capability: tuple[int, ...]) -> bool:
    """Whether a GPU has Tensor Cores for ``float16`` or ``bfloat16``.

    Args:
      dtype: the type.
      capability: (major, minor); empty: not known, as of no GPU.
    """
    return capability >= _TENSOR_CORES[dtype]


def float16_rate(capability: tuple[int, ...]) -> float:
    """Returns how fast a GPU without Tensor Cores adds and multiplies float16; float32 is 1."""
    return _FLOAT16_RATES.get(capability, 0.0)


def precision_instead_of(dtype: str, capability: tuple[int, ...]) -> str:
    """Returns the policy of mixed precision to choose where a GPU is slow in a 16-bit type.

    Args:
      dtype: ``float16`` or ``bfloat16``.
      capability: (major, minor); empty: not known.
    """
    fast = has_tensor_cores("float16", capability) or float16_rate(capability) > 1
    return "mixed_float16" if dtype == "bfloat16" and fast else "float32"
