"""Check of a convolution on each device: forward and backward, each dtype, with and without XLA."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import first_line
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.gpu_arithmetic import has_tensor_cores, precision_instead_of
from imagenet_fast.doctor.finding import Finding, ok, slow, wrong

DTYPES = ("float32", "bfloat16", "float16")
# Relative L2 error of any result that rounding explains. float32: that of TF32, in which TensorFlow
# multiplies float32 on Ampere and later GPUs; bfloat16: that of accumulation in bfloat16, as in
# TensorFlow's CPU kernels (2% was seen).
_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2, "float16": 1e-2}
# A 16-bit type that takes this multiple of float32's time is slow beyond noise.
_SLOWER = 1.5
_REPEATS = 5

_Step = Callable[[], Sequence[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a 3x3 convolution with equally many input and output channels.

    Attributes:
      batch: images.
      pixels: height and width.
      channels: input channels.
    """

    batch: int
    pixels: int
    channels: int


# 16-bit types take a hundred times as long as float32 on many CPUs. The GPU's size is a layer of
# ResNet-50: less work would not show its speed.
ON_CPU = Size(batch=8, pixels=16, channels=32)
ON_GPU = Size(batch=64, pixels=28, channels=256)


def check_convolutions(_: SharedOptions) -> list[Finding]:
    """Checks each device's results against float32 on the CPU, and its speed."""
    gpus = tf.config.list_logical_devices("GPU")
    cpu = tf.config.list_logical_devices("CPU")[0].name
    findings = _check_device(cpu, _operands(ON_CPU))
    if not gpus:
        return findings
    operands = _operands(ON_GPU)
    reference = _step(cpu, operands, "float32", xla=False)
    expected = _numpy(reference())
    seconds = _seconds(reference, repeats=1)
    for gpu in gpus:
        findings += _check_device(gpu.name, operands, expected, cpu_seconds=seconds)
    return findings


def _check_device(
    device: str,
    operands: Sequence[np.ndarray],
    expected: Sequence[np.ndarray] | None = None,
    cpu_seconds: float | None = None,
) -> list[Finding]:
    """Checks a device in each dtype.

    Args:
      device: its name.
      operands: from :func:`_operands`.
      expected: the right results; None: those of float32 on the device itself.
      cpu_seconds: float32's time on the CPU; None: the device is the CPU.
    """
    if expected is None:
        expected = _numpy(_step(device, operands, "float32", xla=False)())
    findings: list[Finding] = []
    float32 = None
    for dtype in DTYPES:
        finding = _check_type(device, operands, expected, dtype)
        if finding.state == "ok" and cpu_seconds is not None:
            if dtype == "float32":
                float32 = finding.numbers["seconds"]["plain"]
            reference = cpu_seconds if dtype == "float32" else float32
            finding = _check_speed(device, finding, dtype, reference)
        findings.append(finding)
    return findings


def _check_type(
    device: str, operands: Sequence[np.ndarray], expected: Sequence[np.ndarray], dtype: str
) -> Finding:
    """Checks a device in one dtype, with and without XLA."""
    name = f"{device.rpartition('device:')[2]} {dtype}"  # as GPU:0 float32
    seconds, errors = {}, {}
    for mode, xla in (("plain", False), ("XLA", True)):
        label = "with XLA" if xla else "without XLA"
        try:
            step = _step(device, operands, dtype, xla)
            results = _numpy(step())
            seconds[mode] = _seconds(step)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            return wrong(name, f"{label}: {first_line(error)}", _advice(xla, dtype))
        errors[mode] = max(map(_difference, results, expected))
        if not errors[mode] <= _TOLERANCE[dtype]:  # also true of NaN
            found = f"{label}: differs by {errors[mode]:.1%} from float32 on the CPU"
            return wrong(name, found, _advice(xla, dtype), errors=errors)
    found = f"{1e3 * seconds['plain']:.2f} ms, {1e3 * seconds['XLA']:.2f} with XLA"
    return ok(name, found, seconds=seconds, errors=errors)


def _check_speed(device: str, finding: Finding, dtype: str, reference: float | None) -> Finding:
    """Returns a GPU's finding, changed to slow if it is.

    Args:
      device: its name.
      finding: that the results are right.
      dtype: of the convolution.
      reference: seconds of float32, for float32 those on the CPU, else those on this GPU; None:
        unknown.
    """
    seconds = finding.numbers["seconds"]["plain"]
    if reference is None or seconds <= reference * (1 if dtype == "float32" else _SLOWER):
        return finding
    other = "float32"
    if dtype == "float32":
        other = f"the CPU's {1e3 * reference:.2f}"
        advice = "see whether other programs use the GPU, or it is throttled (nvidia-smi)"
    elif has_tensor_cores(dtype, capability := _capability(device)):
        advice = "check cuDNN's version in the lines above, and train with --precision=float32"
    else:
        advice = (
            f"compute capability {'.'.join(map(str, capability))} has no tensor cores for it: "
            f"train with --precision={precision_instead_of(dtype, capability)}"
        )
    found = f"{finding.found}, slower than {other}"
    return slow(finding.name, found, advice, **finding.numbers)


def _operands(size: Size) -> list[np.ndarray]:
    """Returns images, kernel, bias and the upstream gradient, exact in all dtypes.

    The bias is so far from 0 that rounding changes no result's sign: the ReLU passes the same
    results in all dtypes.
    """
    random = np.random.default_rng(0)
    shape = (size.batch, size.pixels, size.pixels, size.channels)
    kernel = (3, 3, size.channels, size.channels)

    def eighths(shape: tuple[int, ...]) -> np.ndarray:
        return np.clip(np.round(random.standard_normal(shape) * 8), -24, 24) / 8

    fan_in = 9 * size.channels
    scale = 2.0 ** -np.ceil(np.log2(fan_in) / 2)
    bias = np.where(np.arange(size.channels) % 2, 8.0, -8.0)
    operands = (eighths(shape), eighths(kernel) * scale, bias, eighths(shape))
    return [operand.astype(np.float32) for operand in operands]


def _step(device: str, operands: Sequence[np.ndarray], dtype: str, xla: bool) -> _Step:
    """Returns a function that runs a convolution, with bias and ReLU, and its gradients.

    XLA compiles these to one fused convolution, which not every cuDNN has.
    """
    with tf.device(device):
        tensors = [tf.cast(tf.constant(operand), dtype) for operand in operands]

    def gradients(
        images: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, upstream: tf.Tensor
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            result = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME"), bias))
        results = tape.gradient(result, [images, kernel], output_gradients=upstream)
        # Waiting for a single number is enough.
        return [result, *results, results[1][0, 0, 0, 0]]

    compiled = tf.function(gradients, autograph=False, jit_compile=xla or None)

    def step() -> list[tf.Tensor]:
        with tf.device(device):
            return compiled(*tensors)

    return step


def _seconds(step: _Step, repeats: int = _REPEATS) -> float:
    """Returns the median time of a step that has run before, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        *_, last = step()
        last.numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _numpy(results: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """Returns the result and the gradients, without the number to wait for."""
    return [tf.cast(result, tf.float32).numpy() for result in results[:-1]]


def _difference(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


def _advice(xla: bool, dtype: str) -> str:
    if xla:
        return "train without --xla, or see what is wrong with CUDA in the lines above"
    other = "in float32" if dtype != "float32" else "on another device"
    return f"train {other}, or see what is wrong with CUDA in the lines above"


def _capability(device: str) -> tuple[int, ...]:
    place = int(device.rpartition(":")[2])
    gpus = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[place])
    return details.get("compute_capability") or ()
