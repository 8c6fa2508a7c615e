"""Starting TensorFlow without its remarks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

# Of a process that gets the remarks as its standard output: it shows them unless it gets a byte.
_WATCH = "import os; os.read(0, 1) or os.write(2, os.pread(1, 2**20, 0))"


def import_tensorflow() -> None:
    """Imports TensorFlow and finds its devices.

    What it writes meanwhile, past every log level, is about libraries that a machine without a GPU
    need not have. It is shown only if TensorFlow cannot be imported, ends the process, or finds no
    GPU on a machine that has one.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Else TensorFlow imports Keras 3, too, which nothing here uses and takes half as long again.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as remarks, _shown_at_death(remarks):
        stderr = os.dup(2)
        os.dup2(remarks.fileno(), 2)
        wanted = True
        try:
            import tensorflow as tf

            from imagenet_fast.distribute.cuda import preload_libraries

            # Before TensorFlow looks for the GPUs, which it does once.
            preload_libraries()
            gpus = tf.config.list_physical_devices("GPU")
            wanted = not gpus and pathlib.Path("/dev/nvidia0").exists()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if wanted:
                remarks.seek(0)
                sys.stderr.write(remarks.read().decode(errors="replace"))


@contextlib.contextmanager
def _shown_at_death(remarks: BinaryIO) -> Iterator[None]:
    """Has the remarks be shown if the process dies within the context, as of SIGABRT or SIGILL.

    Then only another process can: it waits at a pipe, which ends with this one.
    """
    watch = subprocess.Popen(
        [sys.executable, "-ISc", _WATCH],
        stdin=subprocess.PIPE,
        stdout=remarks,
        start_new_session=True,  # Ctrl-C is for this process alone.
    )
    try:
        yield
    finally:
        watch.communicate(b".")
