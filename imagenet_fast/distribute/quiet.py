"""Import of TensorFlow and Keras without their start-up messages."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import sys
import tempfile

from imagenet_fast.base.keras_check import check_keras, choose_backend


def import_tensorflow(flags: contextlib.AbstractContextManager[None] | None = None) -> None:
    """Imports TensorFlow and Keras, and lists TensorFlow's devices.

    Meanwhile it prints messages at every log level, about libraries that only machines with a GPU
    need. They are shown only if the import fails, or TensorFlow finds no GPU on a machine that has
    one. If the process dies, as of an instruction that its CPU lacks, faulthandler says so.

    Args:
      flags: context in which it lists the devices, and reads flags in the environment; None: none.

    Raises:
      UserError: if Keras is not for this TensorFlow, or has another backend.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    choose_backend()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as messages:
        stderr = os.dup(2)
        os.dup2(messages.fileno(), 2)
        watched = not faulthandler.is_enabled()
        if watched:
            faulthandler.enable(stderr)
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
            if watched:
                faulthandler.disable()
            os.dup2(stderr, 2)
            os.close(stderr)
            if show:
                messages.seek(0)
                sys.stderr.write(messages.read().decode(errors="replace"))
    check_keras()
