"""TensorFlow ops of our own, compiled where and when they are first needed.

That takes about two seconds and needs a C++ compiler: what ``CXX`` names, with arguments or
without, else ``g++``, ``c++`` or ``clang++``. What was compiled is kept in the user's cache
directory (``XDG_CACHE_HOME``, by default ``~/.cache``).
"""

from __future__ import annotations

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

from imagenet_fast.base.paths import to_local_path

_HEADER = pathlib.Path(__file__).with_suffix(".h")
# Were products and sums made one instruction, the last bits would differ from TensorFlow's.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC")


@functools.cache
def load_ops(source: pathlib.Path) -> ModuleType:
    """Returns the ops that a C++ file registers, by their names in snake case.

    Raises:
      OSError: if they can be neither found nor compiled, with the reason.
    """
    try:
        return tf.load_op_library(str(_build(source)))
    except tf.errors.OpError as error:
        raise OSError(f"TensorFlow cannot load what was compiled: {error}") from error


def _build(source: pathlib.Path) -> pathlib.Path:
    """Compiles a file, unless that has been done, and returns the library's path."""
    flags = [*_FLAGS, *tf.sysconfig.get_link_flags()]
    # Of several machines that share a home directory, each has what fits it.
    needs = [platform.machine(), platform.system(), tf.__version__, *flags]
    text = "\n".join(needs).encode() + _HEADER.read_bytes() + source.read_bytes()
    digest = hashlib.sha256(text).hexdigest()[:16]
    cache = to_local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
    library = cache / "imagenet_fast" / f"{source.stem}-{digest}.so"
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    # Other processes may be compiling it, too.
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = pathlib.Path(directory, library.name)
        folders = ["-I", tf.sysconfig.get_include(), "-I", str(_HEADER.parent)]
        done = subprocess.run(
            [*compiler, *folders, str(source), "-o", str(made), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
            raise OSError(f"{shlex.join(compiler)} does not compile {source}: {reason}")
        made.replace(library)
    return library


def _compiler() -> list[str]:
    """Returns the compiler's command, which may have arguments, as ``CXX="ccache g++"``."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise OSError(f"CXX is {os.environ['CXX']!r}: {error}") from error
    commands = [given] if given else [["g++"], ["c++"], ["clang++"]]
    for command in commands:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in commands)
    raise OSError(f"there is no C++ compiler ({names}): install one")
