"""Warm-up requests in a SavedModel, which TensorFlow Serving runs before it reports ready.

The file is a TFRecord of ``PredictionLog`` messages, whose few fields are encoded here: the package
``tensorflow-serving-api`` requires the package ``tensorflow``, which must not be installed beside
another build, as on TPU VMs.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from PIL import Image
from tensorflow.core.framework import tensor_pb2

from imagenet_fast.base.paths import Path, to_path

FILE = pathlib.PurePath("assets.extra", "tf_serving_warmup_requests")

# Field numbers, from tensorflow_serving/apis/{prediction_log,predict,model}.proto.
_LOG_PREDICT_LOG = 6
_PREDICT_LOG_REQUEST = 1
_REQUEST_MODEL_SPEC = 1
_REQUEST_INPUTS = 2
_SPEC_SIGNATURE_NAME = 3
# Field numbers of map entries.
_KEY, _VALUE = 1, 2
# Wire type of text and messages.
_LENGTH_DELIMITED = 2

Inputs = Mapping[str, tensor_pb2.TensorProto]


def write_warm_up_requests(
    directory: str | os.PathLike[str], requests: Mapping[str, Inputs]
) -> Path:
    """Writes requests, the inputs by name for each signature, into a SavedModel; returns the file.

    Raises:
      OSError: if it cannot be written.
    """
    path = to_path(directory, FILE)
    path.parent.mkdir()
    with tf.io.TFRecordWriter(str(path)) as file:
        for signature, inputs in requests.items():
            file.write(_prediction_log(signature, inputs))
    return path


def synthetic_jpeg(size: int) -> bytes:
    """Returns a JPEG of random pixels, ``size`` high and wide."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def _prediction_log(signature: str, inputs: Inputs) -> bytes:
    request = _field(_REQUEST_MODEL_SPEC, _field(_SPEC_SIGNATURE_NAME, signature.encode()))
    for name, tensor in inputs.items():
        entry = _field(_KEY, name.encode()) + _field(_VALUE, tensor.SerializeToString())
        request += _field(_REQUEST_INPUTS, entry)
    return _field(_LOG_PREDICT_LOG, _field(_PREDICT_LOG_REQUEST, request))


def _field(number: int, content: bytes) -> bytes:
    """Encodes a Protocol Buffers field of text or a message."""
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encodes a number as a Protocol Buffers varint: seven bits per byte, lowest first."""
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
