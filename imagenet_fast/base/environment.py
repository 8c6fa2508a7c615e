"""The environment of a measurement: command, hardware and software versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import pathlib
import platform
import re
import shlex
import sys
from typing import Any

from imagenet_fast.base.cores import cpu_cores

# CPU features that affect the speed of matrix products.
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect results."""
    # Here, so that --help imports neither.
    import keras
    import numpy as np
    import tensorflow as tf

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "imagenet_fast": package_version(),
    }


def package_version() -> str:
    """Returns this package's version; ``not installed`` if it is only on the Python path."""
    try:
        return importlib.metadata.version("imagenet_fast")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hardware() -> dict[str, Any]:
    """Returns ``cpu`` (name), ``cpu_features``, ``cores`` and ``gpus`` (names of visible GPUs).

    Where the system does not report the CPU, ``cpu`` is the architecture and ``cpu_features`` is
    empty.
    """
    import tensorflow as tf

    name, features = cpu_model()
    gpus = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return {
        "cpu": name,
        "cpu_features": [feature for feature in _CPU_FEATURES if feature in features],
        "cores": cpu_cores(),
        "gpus": [gpu.get("device_name", "GPU") for gpu in gpus],
    }


def cpu_name() -> str:
    """Returns the name of this machine's CPU, or its architecture if the name is unknown."""
    return cpu_model()[0]


def command() -> str:
    """Returns this process's command line, without the program's directory."""
    name = pathlib.Path(sys.argv[0])
    # `python -m imagenet_fast` is the same program as the console script.
    program = "imagenet-fast" if name.name == "__main__.py" else name.name
    return shlex.join([program, *sys.argv[1:]])


def now() -> str:
    """Returns the current time in UTC, to the second, in ISO 8601 format."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def provenance() -> dict[str, Any]:
    """Returns ``command``, ``hardware``, ``versions`` and ``finished`` (now) for a result file."""
    return {"command": command(), "hardware": hardware(), "versions": versions(), "finished": now()}


def cpu_model() -> tuple[str, set[str]]:
    """Returns the CPU's name and features, from ``/proc/cpuinfo``; see :func:`hardware`."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    features = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return (
        name[1].strip() if name else platform.processor() or platform.machine(),
        set(features[1].split()) if features else set(),
    )
