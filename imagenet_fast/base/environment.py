"""What a number was measured on: it means little without."""

from __future__ import annotations

import datetime
import importlib.metadata
import pathlib
import platform
import re
import shlex
import sys
from typing import Any

import numpy as np

from imagenet_fast.base.cores import cpu_cores

# Instructions that decide how fast a CPU multiplies matrices.
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide a result."""
    import tensorflow as tf  # here: programs print their help without it
    import tf_keras as keras

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "tf_keras": keras.__version__,
        "numpy": np.__version__,
        "imagenet_fast": own_version(),
    }


def own_version() -> str:
    """Returns this package's version; ``not installed`` where it is only found on the path."""
    try:
        return importlib.metadata.version("imagenet_fast")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hardware() -> dict[str, Any]:
    """Returns ``cpu`` (its name), ``cpu_features``, and what TensorFlow uses: ``cores``, ``gpus``.

    Where the system does not say, the name is the architecture's and there are no features.
    """
    import tensorflow as tf

    name, features = _cpu()
    gpus = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return {
        "cpu": name,
        "cpu_features": [feature for feature in _CPU_FEATURES if feature in features],
        "cores": cpu_cores(),
        "gpus": [gpu.get("device_name", "GPU") for gpu in gpus],
    }


def cpu_name() -> str:
    """Returns the name of this machine's CPU; the architecture's where the system does not say."""
    return _cpu()[0]


def command() -> str:
    """Returns this process' command line, without the program's directory."""
    name = pathlib.Path(sys.argv[0])
    # `python -m imagenet_fast` and the console script are the same command.
    program = "imagenet-fast" if name.name == "__main__.py" else name.name
    return shlex.join([program, *sys.argv[1:]])


def now() -> str:
    """Returns this moment, to the second, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def provenance() -> dict[str, Any]:
    """Returns ``command``, ``hardware``, ``versions`` and ``finished``, this moment, for a file."""
    return {
        "command": command(),
        "hardware": hardware(),
        "versions": versions(),
        "finished": now(),
    }


def _cpu() -> tuple[str, set[str]]:
    """Returns the CPU's name and its features, as Linux lists them."""
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
