"""Import of TensorFlow without its start-up messages."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

# Python code of a process whose standard output is the file of messages: it prints them when its
# standard input ends without a byte.
_WATCH = "import os; os.read(0, 1) or os.write(2, os.pread(1, 2**20, 0))"


def import_tensorflow(flags: contextlib.AbstractContextManager[None] | None = None) -> None:
    """Imports TensorFlow and lists its devices.

    Meanwhile it prints messages at every log level, about libraries that only machines with a GPU
    need. They are shown only if the import fails, the process dies, or TensorFlow finds no GPU on a
    machine that has one.

    Args:
      flags: context in which it lists the devices, and reads flags in the environment; None: none.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Without this, TensorFlow also imports Keras 3, which is unused and takes half as long again.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as messages, _shown_at_death(messages):
        stderr = os.dup(2)
        os.dup2(messages.fileno(), 2)
        show = True
        try:
            import tensorflow as tf

            from imagenet_fast.distribute.cuda import preload_libraries

            # Before TensorFlow searches for GPUs, which it does once.
            preload_libraries()
            with flags or contextlib.nullcontext():
                gpus = tf.config.list_physical_devices("GPU")
            show = not gpus and pathlib.Path("/dev/nvidia0").exists()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if show:
                messages.seek(0)
                sys.stderr.write(messages.read().decode(errors="replace"))


@contextlib.contextmanager
def _shown_at_death(messages: BinaryIO) -> Iterator[None]:
    """Shows the messages if the process dies in the context, for example by SIGABRT or SIGILL.

    Another process does so, when the pipe from this process closes.
    """
    watch = subprocess.Popen(
        [sys.executable, "-ISc", _WATCH],
        stdin=subprocess.PIPE,
        stdout=messages,
        start_new_session=True,  # Ctrl-C does not reach it.
    )
    try:
        yield
    finally:
        watch.communicate(b".")
