"""Records of shards: a ``tf.train.Example`` of one encoded image each.

The fields are those of the ImageNet converters of tensorflow/tpu and TensorFlow Model Garden, so
their programs can read these shards, and this package theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from imagenet_fast.data.images import PNG_SIGNATURE

ENCODED = "image/encoded"
FORMAT = "image/format"
LABEL = "image/class/label"
TEXT = "image/class/text"
SYNSET = "image/class/synset"
HEIGHT = "image/height"
WIDTH = "image/width"
CHANNELS = "image/channels"
COLORSPACE = "image/colorspace"
FILENAME = "image/filename"
JPEG_INDEX = "image/jpeg_index"

# The class of an image; in multi-label data, all classes of the image, each once.
Label = Union[int, tuple[int, ...]]


def encode_example(
    encoded: bytes,
    *,
    label: Label,
    text: str | tuple[str, ...],
    filename: str,
    height: int,
    width: int,
    channels: int,
    synset: str | None = None,
    jpeg_index: bytes = b"",
) -> bytes:
    """Returns a serialized ``tf.train.Example`` of one image.

    Args:
      encoded: the image as a JPEG or PNG file.
      label: index of the class, or those of several.
      text: the class's name, or those of several.
      filename: the image's name in its source, for display.
      height: in pixels.
      width: in pixels.
      channels: 1 (greyscale) or 3 (RGB).
      synset: the class's WordNet id; if None, there is no such field.
      jpeg_index: the JPEG's index from ``jpeg.index.index_jpegs``; if empty, there is no such
        field.

    Returns:
      The same bytes for the same arguments, in every process.
    """
    import tensorflow as tf  # here, because reading a manifest needs no TensorFlow

    example = tf.train.Example()
    fields = example.features.feature
    for name, number in ((HEIGHT, height), (WIDTH, width), (CHANNELS, channels)):
        fields[name].int64_list.value.append(number)
    fields[LABEL].int64_list.value.extend(classes_of(label))
    texts = (text,) if isinstance(text, str) else text
    fields[TEXT].bytes_list.value.extend(name.encode() for name in texts)
    strings = {
        FORMAT: "PNG" if encoded.startswith(PNG_SIGNATURE) else "JPEG",
        COLORSPACE: "Grayscale" if channels == 1 else "RGB",
        FILENAME: filename,
    }
    if synset is not None:
        strings[SYNSET] = synset
    for name, string in strings.items():
        fields[name].bytes_list.value.append(string.encode())
    fields[ENCODED].bytes_list.value.append(encoded)
    if jpeg_index:
        fields[JPEG_INDEX].bytes_list.value.append(jpeg_index)
    # The order of a protobuf map otherwise depends on hashes.
    return example.SerializeToString(deterministic=True)


def classes_of(label: Label) -> tuple[int, ...]:
    """Returns the classes of an image."""
    return (label,) if isinstance(label, int) else label


def labels_of(fields: Mapping[str, list[Any]], *, multi_label: bool) -> tuple[int, ...]:
    """Returns the labels of a record.

    Args:
      fields: of :func:`decode_example`.
      multi_label: whether there may be any number of labels, or none; otherwise it is the first.

    Raises:
      ValueError: it has none, or one that is no integer of 32 bits.
    """
    values = fields.get(LABEL, [])
    labels = tuple(values) if multi_label else (next(iter(values), None),)
    for label in labels:
        if not isinstance(label, int) or not -(2**31) <= label < 2**31:
            raise ValueError(f"its label is {label!r:.100}, but must be a whole number of 32 bits")
    return labels


def decode_example(record: bytes) -> dict[str, list[Any]]:
    """Returns the fields of a serialized ``tf.train.Example`` as lists of bytes, int or float.

    Raises:
      ValueError: ``record`` is not a ``tf.train.Example``.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        fields = tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise ValueError("not a tf.train.Example") from error
    values = {}
    for name, feature in fields.items():
        kind = feature.WhichOneof("kind")
        values[name] = list(getattr(feature, kind).value) if kind else []
    return values


def file_name(record: bytes) -> str:
    """Returns the name of a record's image in its source; empty if it has none."""
    try:
        values = decode_example(record).get(FILENAME, [])
    except ValueError:
        return ""
    name = b"".join(value for value in values if isinstance(value, bytes))
    return name.decode(errors="replace")
