"""Checks that Keras is one for this TensorFlow, its backend, and that images have channels last."""

from __future__ import annotations

import os

from imagenet_fast.base.errors import UserError, first_line

# The oldest Keras 3 that this package is tested with, and the first TensorFlow that needs Keras 3.
_OLDEST = (3, 10)
_NEEDS_KERAS_3 = (2, 16)


def choose_backend() -> None:
    """Makes TensorFlow Keras' backend, whatever ``keras.json`` says, before Keras is imported.

    Raises:
      UserError: if ``KERAS_BACKEND`` is another one.
    """
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    os.environ["KERAS_BACKEND"] = backend
    _require_tensorflow(backend)


def check_keras() -> None:
    """Imports Keras, after TensorFlow, and checks its version, backend and layout of images.

    Raises:
      UserError: if Keras is not for this TensorFlow, or has another backend or layout.
    """
    import tensorflow as tf

    new = major_minor(tf.__version__) >= _NEEDS_KERAS_3
    advice = "'keras>=" + ".".join(map(str, _OLDEST)) + "'" if new else "'keras==2.15.*'"
    try:
        import keras
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        raise UserError(
            f"Keras cannot be imported with TensorFlow {tf.__version__}: {first_line(error)}; "
            f"pip install {advice}"
        ) from error
    version = major_minor(keras.__version__)
    if version < _OLDEST if new else version >= (3, 0):
        raise UserError(
            f"Keras {keras.__version__} is not for TensorFlow {tf.__version__}; "
            f"pip install {advice}"
        )
    _require_tensorflow(keras.backend.backend())
    layout = keras.backend.image_data_format()
    if layout != "channels_last":
        raise UserError(
            f"image_data_format of Keras is {layout}, but images here have channels last; write "
            "channels_last into ~/.keras/keras.json, or call "
            "keras.backend.set_image_data_format('channels_last') before"
        )


def is_tf_keras(kind: type) -> bool:
    """Returns whether a class is one of tf_keras, which has Keras 2, or inherits from one."""
    return any(base.__module__.startswith("tf_keras.") for base in kind.__mro__)


def _require_tensorflow(backend: str) -> None:
    if backend != "tensorflow":
        raise UserError(
            f"the backend of Keras is {backend}, but must be tensorflow; set "
            "KERAS_BACKEND=tensorflow before Keras is imported"
        )


def major_minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(map(int, version.split(".")[:2]))
