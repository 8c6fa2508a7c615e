"""Compiles and loads the package's native TensorFlow ops on first use.

Compiling takes some seconds and needs a C++ compiler: the command in ``CXX``, which may have
arguments, else ``g++``, ``c++`` or ``clang++``. The library is cached in the user's own folder;
where there is none, each process compiles it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from types import ModuleType

import tensorflow as tf

from imagenet_fast.base.cache_folder import cache_folder
from imagenet_fast.base.environment import cpu_model

_HEADER = pathlib.Path(__file__).with_suffix(".h")
# Without fused multiply-add, whose results differ from TensorFlow's in the last bits.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC")

# Flags by the kernel's names of the instructions; each group needs the one before it.
_INSTRUCTIONS = (
    {"avx2": "-mavx2", "bmi2": "-mbmi2"},
    {
        "fma": "-mfma",  # without it, Eigen's headers refuse AVX-512
        "avx512f": "-mavx512f",
        "avx512bw": "-mavx512bw",
        "avx512vl": "-mavx512vl",
        "avx512vbmi": "-mavx512vbmi",
        "avx512_vnni": "-mavx512vnni",
    },
)


@functools.cache
def load_ops(source: pathlib.Path, *others: pathlib.Path) -> ModuleType:
    """Returns a module with the ops, in snake case, of a C++ file and of the files that it needs.

    Raises:
      OSError: if the ops cannot be compiled or loaded; the message gives the reason.
    """
    try:
        return tf.load_op_library(str(_build(source, *others)))
    except tf.errors.OpError as error:
        raise OSError(f"TensorFlow cannot load the compiled op: {error}") from error


def _build(source: pathlib.Path, *others: pathlib.Path) -> pathlib.Path:
    """Returns the path of the compiled library in the cache, after compiling it if necessary."""
    files = (_HEADER, source, *others)
    # Both of TensorFlow's libraries: its decoders are in the larger one, which links to the other.
    links = [*tf.sysconfig.get_link_flags(), "-l:libtensorflow_cc.so.2"]
    flags = [*_FLAGS, *machine_flags(), *links]
    # The name depends on the platform because machines may share a home directory.
    platform_id = [platform.machine(), platform.system(), tf.__version__, *flags]
    text = b"".join(("\n".join(platform_id).encode(), *(file.read_bytes() for file in files)))
    digest = hashlib.sha256(text).hexdigest()[:16]
    folder = cache_folder() or _folder_of_process()
    library = folder / f"{source.stem}-{digest}.so"
    if library.is_file():
        return library
    compiler = _compiler()
    # Other processes may compile at the same time; replace() is atomic.
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        output = pathlib.Path(directory, library.name)
        headers = pathlib.Path(tf.sysconfig.get_include())
        decoders = [headers / "external" / name for name in ("png", "libjpeg_turbo")]
        folders = [
            *(f"-I{folder}" for folder in sorted({file.parent for file in files})),
            *(f"-isystem{folder}" for folder in (headers, *decoders)),
        ]
        units = [str(file) for file in files if file.suffix == ".cc"]
        done = subprocess.run(
            [*compiler, *folders, *units, "-o", str(output), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            reason = next((line for line in lines if "error: " in line), lines[0])
            raise OSError(f"{shlex.join(compiler)} cannot compile {source}: {reason}")
        output.replace(library)
    return library


@functools.cache
def _folder_of_process() -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="imagenet-fast-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def machine_flags() -> tuple[str, ...]:
    """Returns the compiler's flags for instructions that this machine has.

    The ops use AVX2, and of AVX-512 what Ice Lake, Zen 4 and later processors have.
    """
    _, features = cpu_model()
    flags: tuple[str, ...] = ()
    for needed in _INSTRUCTIONS:
        if not needed.keys() <= features:
            break
        flags += tuple(needed.values())
    return flags


def _compiler() -> list[str]:
    """Returns the compiler's command with its arguments, such as ``["ccache", "g++"]``."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise OSError(f"CXX is {os.environ['CXX']!r}: {error}") from error
    commands = [given] if given else [["g++"], ["c++"], ["clang++"]]
    for command in commands:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in commands)
    raise OSError(f"no C++ compiler found ({names}): install one")
