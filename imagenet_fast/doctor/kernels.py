"""Check of what the driver's compiler costs on GPUs for which TensorFlow has no machine code.

TensorFlow's kernels are machine code for some compute capabilities, and PTX for the newest one, of
which the driver makes machine code when a process first uses a kernel. It keeps that in a cache
(CUDA C++ Programming Guide, "CUDA Environment Variables").
"""

from __future__ import annotations

import os
import pathlib
import time

import tensorflow as tf

from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute import cuda
from imagenet_fast.doctor.finding import Finding, ok, slow

# Kernels of TensorFlow itself, not of CUDA's libraries, that nothing has used before.
_KERNELS = (tf.math.atan, tf.math.cosh, tf.math.digamma, tf.math.erfc, tf.math.lgamma, tf.math.sinh)
# Bytes of the cache: by default, and at most.
_CACHE, _LARGEST_CACHE = 2**30, 2**32
_KEEP = f"CUDA_CACHE_MAXSIZE={_LARGEST_CACHE}"


def check_kernels(_: SharedOptions) -> list[Finding]:
    """Times first uses of kernels on each GPU that needs the driver's compiler."""
    gpus = zip(tf.config.get_visible_devices("GPU"), tf.config.list_logical_devices("GPU"))
    found = (_check(place, *devices) for place, devices in enumerate(gpus))
    return [finding for finding in found if finding]


def _check(
    place: int, device: tf.config.PhysicalDevice, logical: tf.config.LogicalDevice
) -> Finding | None:
    details = tf.config.experimental.get_device_details(device)
    capability = details.get("compute_capability") or ()
    build = cuda.built_for()
    if not capability or not build.capabilities or build.has_machine_code(capability):
        return None
    first, second = _seconds(logical.name), _seconds(logical.name)
    name, dotted = f"GPU:{place} kernels", ".".join(map(str, capability))
    numbers = {"kernels": len(_KERNELS), "first_seconds": first, "second_seconds": second}
    found = (
        f"TensorFlow {tf.__version__} has no machine code for compute capability {dotted}: the "
        f"driver compiles each kernel at its first use; {len(_KERNELS)} took {first:.2f} s then, "
        f"and {1e3 * second:.1f} ms afterwards"
    )
    if capability[0] > build.capabilities[-1][0]:
        found += ". All of them may take half an hour"
        advice = f"use a TensorFlow that is built for it, such as NVIDIA's containers, or {_KEEP}"
        return slow(name, found, advice, **numbers)
    problem = _cache_problem()
    if problem:
        return slow(name, f"{found}. {problem}", f"{_KEEP} keeps all of them", **numbers)
    return ok(name, f"{found}; {_KEEP} keeps all of them for the next process", **numbers)


def _seconds(device: str) -> float:
    """Returns the seconds of one use of each kernel, after the device has been started."""
    with tf.device(device):
        number = tf.constant(0.5) + 1.0
        number.numpy()
        start = time.perf_counter()
        for kernel in _KERNELS:
            kernel(number).numpy()
        return time.perf_counter() - start


def _cache_problem() -> str:
    """Returns why the driver's cache may not keep the kernels; empty: it does."""
    if os.environ.get("CUDA_CACHE_DISABLE") == "1":
        return "CUDA_CACHE_DISABLE=1 makes each process compile them again"
    size = os.environ.get("CUDA_CACHE_MAXSIZE", "")
    if size.isdecimal() and int(size) < _CACHE:
        return f"CUDA_CACHE_MAXSIZE={size} is less than the default, {_CACHE}"
    folder = os.environ.get("CUDA_CACHE_PATH") or "~/.nv/ComputeCache"
    path = pathlib.Path(folder).expanduser()
    existing = next(own for own in (path, *path.absolute().parents) if own.exists())
    if not os.access(existing, os.W_OK):
        return f"The driver cannot keep them in {path}: give CUDA_CACHE_PATH another folder"
    return ""
