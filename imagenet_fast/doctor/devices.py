"""Check that TensorFlow sees all GPUs that NVIDIA's driver shows."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.environment import hardware
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import cuda
from imagenet_fast.distribute.gpus import cpu_is_requested, gpu_name, installed_gpus
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.doctor.finding import Finding, ok, slow, wrong


def check_devices(options: ClusterOptions) -> list[Finding]:
    """Compares the GPUs that TensorFlow sees with those of the driver."""
    cpu = hardware()
    seen = tf.config.list_physical_devices("GPU")
    findings = [ok("CPU", f"{cpu['cpu']}, {cpu_cores()} cores", features=cpu["cpu_features"])]
    names = [gpu_name(device) for device in seen]
    try:
        shown = installed_gpus()
    except UserError:  # which the driver's own finding reports
        shown = []
        if not seen and not cpu_is_requested(options.gpus):
            found = "TensorFlow sees no GPU, and the driver does not respond"
            return [*findings, wrong("GPUs", found, "see the line of the driver")]
    found = f"TensorFlow sees {_counted(names)}; the driver shows {_counted(shown)}"
    numbers = {"seen": names, "shown": shown}
    if len(seen) >= len(shown):
        findings.append(ok("GPUs", found if shown else _counted(names), **numbers))
    elif seen and "CUDA_VISIBLE_DEVICES" in os.environ:
        # A user, Slurm or the local launcher assigned these GPUs to the process.
        findings.append(ok("GPUs", f"{found} (CUDA_VISIBLE_DEVICES)", **numbers))
    elif seen:
        advice = (
            "see with `nvidia-smi` whether the others fail; TF_CPP_MIN_LOG_LEVEL=0 shows why "
            "TensorFlow ignores them, as it does with GPUs much slower than the best"
        )
        findings.append(slow("GPUs", found, advice, **numbers))
    else:
        problem = cuda.find_problem()
        findings.append(wrong("GPUs", f"{found}: {problem.reason}", problem.advice, **numbers))
    return findings


def _counted(names: Sequence[str]) -> str:
    """Returns the names of GPUs with counts, as ``8 NVIDIA H100``."""
    counts = collections.Counter(names)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no GPU"
