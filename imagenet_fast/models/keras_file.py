"""Models in ``.keras`` files, which others may have made."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tf_keras.src.saving import saving_lib, serialization_lib

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.outside import parse_json
from imagenet_fast.base.paths import Path
from imagenet_fast.models.hdf5 import read_hdf5
from imagenet_fast.models.keras_config import checked_config

_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
# 500 layers have 400 kB.
_LARGEST_CONFIG = 2**23
# Of variables that are not in the file, such as random seeds.
_BEYOND_FILE = 2**20
# Keras' messages can hold the whole configuration.
_LONGEST_REASON = 500


def load_keras_file(path: Path) -> keras.Model:
    """Reads a model, uncompiled, from a ``.keras`` file that Keras 2 or tf_keras wrote.

    Nothing that the file names is imported or called but layers that only compute: see
    :func:`~imagenet_fast.models.keras_config.checked_config`. Its optimizer, losses and metrics are
    ignored.

    Raises:
      UserError: if it cannot be read, or has anything else.
    """
    try:
        config, weights = _read(path)
        store = _Weights(weights)
        with serialization_lib.ObjectSharingScope(), _weights_of_at_most(len(weights)):
            model = keras.saving.deserialize_keras_object(config, safe_mode=True)
        if not isinstance(model, keras.Model):
            raise ValueError(f"{_CONFIG} describes a {type(model).__name__}, not a model")
        saving_lib._load_state(
            model, store, assets_store=None, inner_path="", visited_trackables=set()
        )
    # Layers raise whatever they like for wrong arguments, and ``zipfile`` for damage.
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        reason = f"{kind}{first_line(error)}"[:_LONGEST_REASON]
        raise UserError(f"cannot read a model from {path}: {reason}") from error
    return model


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns a file's checked configuration, and its weights in HDF5."""
    if path.is_dir():
        raise IsADirectoryError(
            "it is a folder, such as a SavedModel, which can hold any code; "
            "if you trust it, tf_keras.models.load_model reads it"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(
                "it is not a zip file, as Keras' format .keras is; a file in HDF5 format (.h5) can "
                "hold any code: if you trust it, tf_keras.models.load_model reads it"
            )
        size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            text = _member(archive, _CONFIG, min(size, _LARGEST_CONFIG))
            config = checked_config(parse_json(text, dict[str, Any]))
            return config, _member(archive, _WEIGHTS, size)


def _member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"it has no {name}") from None
    # Keras does not compress; what is not compressed cannot be larger than the file.
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} in it is compressed: unpack it, and pack it with `zip -0`")
    if member.file_size > limit or member.compress_size != member.file_size:
        raise ValueError(f"{name} in it has {member.file_size:,} bytes, but may have {limit:,}")
    return archive.read(member)


class _Weights:
    """The arrays in a file's HDF5, for Keras' ``load_own_variables``."""

    def __init__(self, data: bytes) -> None:
        content = read_hdf5(data)
        self._layers: dict[str, dict[str, np.ndarray]] = {}
        for path, values in content.arrays.items():
            layer, _, name = path.rpartition("/")
            self._layers.setdefault(layer, {})[name] = values

    def get(self, path: str) -> dict[str, np.ndarray]:
        return self._layers.get(f"{path}/vars" if path else "vars", {})


@contextmanager
def _weights_of_at_most(limit: int) -> Iterator[None]:
    """Raises a ValueError in the context before variables need more bytes than the file has."""
    total = 0

    def creator(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        nonlocal total
        shape = tf.TensorShape(options.get("shape"))
        if shape.is_fully_defined():
            # Python's integers: NumPy's overflow.
            elements = 1
            for length in shape.as_list():
                elements *= length
            total += elements * tf.as_dtype(options.get("dtype") or tf.float32).size
        if total > limit + _BEYOND_FILE:
            raise ValueError(
                f"its layers need {total:,} bytes of weights or more, but its weights have "
                f"{limit:,}"
            )
        return make(**options)

    with tf.variable_creator_scope(creator):
        yield
