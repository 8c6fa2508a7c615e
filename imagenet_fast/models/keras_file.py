"""Models in ``.keras`` files, which others may have made."""

from __future__ import annotations

import io
import math
import pathlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.serialization_lib import ObjectSharingScope

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.base.outside import parse_json
from imagenet_fast.base.paths import Path
from imagenet_fast.models.hdf5 import Hdf5Content, read_hdf5
from imagenet_fast.models.keras_config import checked_config
from imagenet_fast.models.shape_only import spec_of

_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
# 500 layers have 400 kB.
_LARGEST_CONFIG = 2**23
# Of variables that are not in the file, such as random seeds.
_BEYOND_FILE = 2**20
# Keras' messages can hold the whole configuration.
_LONGEST_REASON = 500


def load_keras_file(path: Path) -> keras.Model:
    """Reads a model, uncompiled, from a ``.keras`` file of Keras 3, tf_keras or Keras 2.

    Nothing that the file names is imported or called but layers that only compute: see
    :func:`~imagenet_fast.models.keras_config.checked_config`. Its optimizer, losses and metrics are
    ignored.

    Raises:
      UserError: if it cannot be read, or has anything else.
    """
    try:
        config, weights = _read(path)
        content = read_hdf5(weights)
        with ObjectSharingScope(), weights_of_at_most(len(weights)):
            model = keras.saving.deserialize_keras_object(config, safe_mode=True)
        if not isinstance(model, keras.Model):
            raise ValueError(f"{_CONFIG} describes a {type(model).__name__}, not a model")
        if model.built:
            set_weights(model, content)
    # Layers raise whatever they like for wrong arguments, and ``zipfile`` for damage.
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        # Keras puts the whole configuration before the reason.
        words = str(error).rpartition("Exception encountered: ")[2].split()
        reason = f"{kind}{' '.join(words)}"[:_LONGEST_REASON]
        raise UserError(f"cannot read a model from {path}: {reason}") from error
    return model


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns a file's checked configuration, and its weights in HDF5."""
    if path.is_dir():
        raise IsADirectoryError(
            "it is a folder, such as a SavedModel, which can hold any code; "
            "if you trust it, keras.saving.load_model reads it"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(
                "it is not a zip file, as Keras' format .keras is; a file in HDF5 format (.h5) can "
                "hold any code: if you trust it, keras.saving.load_model reads it"
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


def set_weights(model: keras.Model, content: Hdf5Content) -> None:
    """Sets a model's weights to the arrays of a file, by their paths in it.

    Keras reads them from a file of our own with these arrays only: links to other files, compressed
    data and damage in the file that was given do not reach the HDF5 library.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "model.weights.h5")
        model.save_weights(file)
        expected = read_hdf5(file.read_bytes()).arrays
        # Keras 2 has private attributes where Keras 3 has public ones.
        former = {path.replace("/_", "/"): path for path in content.arrays}
        lacking = [path for path in expected if path in former and path not in content.arrays]
        with h5py.File(file, "w") as copy:
            for group in content.groups:
                copy.require_group(group)
            for path, values in content.arrays.items():
                copy[path] = values
            for path in lacking:
                copy[path] = content.arrays[former[path]]
        model.load_weights(file)


def set_all_weights(model: keras.Model, content: Hdf5Content) -> None:
    """Sets all of a model's weights to arrays of a file, as :func:`set_weights`.

    Raises:
      ValueError: if some are not in the file, for which Keras only warns, or are not numbers.
    """
    floating = [own for own in model.weights if tf.as_dtype(own.dtype).is_floating]
    for own in floating:
        own.assign(np.full(own.shape, np.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            set_weights(model, content)
        except ValueError as error:
            raise ValueError(_of_first_layer(str(error))) from None
    for own in floating:
        if np.isnan(own.numpy()).any():
            raise ValueError(f"{name_of(own)} is not in it, or not a number")


def _of_first_layer(message: str) -> str:
    """Returns what Keras says of the first layer whose weights do not fit, in a line."""
    reason = message.rpartition("Example error message for object ")[2]
    for beyond in ("List of objects", "Target variable:"):  # which is followed by its values
        reason = reason.partition(beyond)[0]
    return " ".join(reason.split())[:_LONGEST_REASON]


@contextmanager
def weights_of_at_most(limit: int) -> Iterator[None]:
    """Raises a ValueError in the context before variables need more bytes than the file has."""
    total = 0

    def creator(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        nonlocal total
        spec = spec_of(**options)
        # Python's integers: NumPy's overflow.
        total += math.prod(spec.shape.as_list()) * spec.dtype.size
        if total > limit + _BEYOND_FILE:
            raise ValueError(
                f"its layers need {total:,} bytes of weights or more, but its file allows {limit:,}"
            )
        return make(**options)

    with tf.variable_creator_scope(creator):
        yield
