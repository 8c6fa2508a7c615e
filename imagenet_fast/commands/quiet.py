"""Starting TensorFlow without its remarks."""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile


def import_tensorflow() -> None:
    """Imports TensorFlow and finds its devices.

    What it writes meanwhile, past every log level, is about libraries that a machine without a GPU
    need not have. It is shown only if TensorFlow cannot be imported, or finds no GPU on a machine
    that has one.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Else TensorFlow imports Keras 3, too, which nothing here uses and takes half as long again.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as remarks:
        os.dup2(remarks.fileno(), 2)
        wanted = True
        try:
            import tensorflow as tf

            gpus = tf.config.list_physical_devices("GPU")
            wanted = not gpus and pathlib.Path("/dev/nvidia0").exists()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if wanted:
                remarks.seek(0)
                sys.stderr.write(remarks.read().decode(errors="replace"))
