"""Resizing by an op of our own, to the bit as TensorFlow's ops do it, but several times faster.

``resize_op.cc`` is compiled where and when it is first needed, which takes about two seconds, and
kept in the user's cache directory (``XDG_CACHE_HOME``, by default ``~/.cache``). That needs a C++
compiler: what ``CXX`` names, else ``g++``, ``c++`` or ``clang++``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.errors import UserError
from imagenet_fast.notices import tell_once

_SOURCE = pathlib.Path(__file__).with_suffix(".cc")
# Were products and sums made one instruction, the last bits would differ from TensorFlow's.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC")


def with_resize_kernel(config: Config) -> Config:
    """Returns the configuration with the ``resize_kernel`` that pipelines of this process take.

    That is the native one, unless TensorFlow's is asked for or ``auto`` cannot have it, which is
    then told.

    Raises:
      UserError: if the native one is asked for and cannot be had.
    """
    if config.resize_kernel == "tensorflow":
        return config
    try:
        _load()
    except OSError as error:
        if config.resize_kernel == "native":
            raise UserError(f"resize_kernel=native cannot be had: {error}") from error
        tell_once(f"resize_kernel: TensorFlow's, which is slower, since {error}")
        return config.replace(resize_kernel="tensorflow")
    return config.replace(resize_kernel="native")


def resize(image: tf.Tensor, size: int, method: str, mirrored: tf.Tensor | bool) -> tf.Tensor:
    """Resizes an image with the native kernel.

    Args:
      image: uint8 [height, width, 3].
      size: height and width of the result.
      method: ``bilinear`` or ``bicubic``.
      mirrored: whether left and right change places; a bool scalar.

    Returns:
      uint8 [size, size, 3], rounded to the nearest and clipped to 0..255.

    Raises:
      OSError: if there is no such kernel here.
    """
    resized = _load()(image=image, mirrored=mirrored, size=size, method=method)
    return tf.ensure_shape(resized, [size, size, 3])


@functools.cache
def _load() -> Callable[..., tf.Tensor]:
    """Returns the op.

    Raises:
      OSError: if it can be neither found nor compiled, with the reason.
    """
    try:
        return tf.load_op_library(str(_build())).imagenet_fast_resize
    except (tf.errors.OpError, AttributeError) as error:
        raise OSError(f"TensorFlow cannot load what was compiled: {error}") from error


def _build() -> pathlib.Path:
    """Compiles the op, unless that has been done, and returns its path."""
    flags = [*_FLAGS, *tf.sysconfig.get_link_flags()]
    # Of several machines that share a home directory, each has what fits it.
    needs = [platform.machine(), platform.system(), tf.__version__, *flags]
    digest = hashlib.sha256("\n".join(needs).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    library = cache / "imagenet_fast" / f"resize_op-{digest}.so"
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    # Other processes may be compiling it, too.
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = pathlib.Path(directory, library.name)
        paths = ["-I", tf.sysconfig.get_include(), str(_SOURCE), "-o", str(made)]
        done = subprocess.run(
            [compiler, *paths, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
            raise OSError(f"{compiler} does not compile {_SOURCE}: {reason}")
        made.replace(library)
    return library


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        if shutil.which(name):
            return name
    raise OSError(f"there is no C++ compiler ({', '.join(names)}): install one")
