"""TFRecord shards of encoded images: how an example is written, framed, checked and read back.

The fields of an example are those of the ImageNet converters of tensorflow/tpu and of TensorFlow
Model Garden, so their programs read these shards and this package reads theirs. The framing is
TFRecord's: per record the length (uint64), a checksum of the length, the data, and a checksum of
the data; both checksums are "masked" CRC-32C. It is done here in Python because TensorFlow's reader
stops at a damaged record without saying where, and cannot go past it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import google_crc32c

from imagenet_fast.errors import UserError

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

_HEADER = struct.Struct("<QI")  # length, masked checksum of the length's 8 bytes
_FOOTER = struct.Struct("<I")  # masked checksum of the data
_OVERHEAD = _HEADER.size + _FOOTER.size


class CorruptRecordError(UserError):
    """A shard cannot be read past this record: the message names the file, record and offset."""

    def __init__(self, path: Path, record: int, offset: int, reason: str) -> None:
        super().__init__(f"{path}: record {record}, at byte {offset}, is corrupt: {reason}")
        self.path = path
        self.record = record
        self.offset = offset


class Written(NamedTuple):
    """What ``write_records`` wrote: number of records, size in bytes and hex SHA-256."""

    examples: int
    bytes: int
    sha256: str


# --- Examples ---------------------------------------------------------------------------------


def encode_example(
    jpeg: bytes,
    *,
    label: int,
    text: str,
    filename: str,
    height: int,
    width: int,
    channels: int,
    synset: str | None = None,
) -> bytes:
    """Returns a serialised ``tf.train.Example`` of one image.

    Args:
      jpeg: The image as a JPEG file, ``height`` x ``width`` pixels, ``channels`` 1 (grey) or 3.
      label: The class, from 0.
      text: The class's name.
      filename: The name that the image had in its source, for people who look for it.
      height: In pixels.
      width: In pixels.
      channels: 1 or 3.
      synset: The class's WordNet id; the field is left out when None.

    Returns:
      The same bytes for the same arguments, in every process.
    """
    import tensorflow as tf  # here, because who reads a manifest needs no TensorFlow

    example = tf.train.Example()
    fields = example.features.feature
    for name, number in (
        (LABEL, label),
        (HEIGHT, height),
        (WIDTH, width),
        (CHANNELS, channels),
    ):
        fields[name].int64_list.value.append(number)
    strings = {
        FORMAT: "JPEG",
        TEXT: text,
        COLORSPACE: "Grayscale" if channels == 1 else "RGB",
        FILENAME: filename,
    }
    if synset is not None:
        strings[SYNSET] = synset
    for name, string in strings.items():
        fields[name].bytes_list.value.append(string.encode())
    fields[ENCODED].bytes_list.value.append(jpeg)
    # Deterministic: the order of a protobuf map is otherwise a matter of hashing.
    return example.SerializeToString(deterministic=True)


def decode_example(record: bytes) -> dict[str, list[Any]]:
    """Returns the fields of a serialised ``tf.train.Example`` as lists of bytes, int or float.

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


# --- Files ------------------------------------------------------------------------------------


def write_records(path: str | os.PathLike[str], records: Iterable[bytes]) -> Written:
    """Writes a TFRecord file: under a temporary name beside ``path``, then renamed.

    Args:
      path: The file to make or replace. Its directory must exist.
      records: The data of each record. If iterating raises, nothing is left behind.

    Returns:
      The number of records, the file's size and its SHA-256.
    """
    path = Path(path)
    temporary = temporary_name(path)
    digest = hashlib.sha256()
    examples = size = 0
    try:
        with temporary.open("wb") as file:
            for data in records:
                length = struct.pack("<Q", len(data))
                frame = b"".join((length, _checksum(length), data, _checksum(data)))
                file.write(frame)
                digest.update(frame)
                examples += 1
                size += len(frame)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Written(examples, size, digest.hexdigest())


def temporary_name(path: Path) -> Path:
    """Returns the name under which ``path`` is written before it is renamed into place."""
    return path.with_name(f".{path.name}.tmp")


def read_records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields the data of each record of a TFRecord file, both checksums verified.

    Raises:
      CorruptRecordError: At the first record that is damaged or cut short.
      UserError: There is no such file.
    """
    path = Path(path)
    with _open(path) as file:
        for number, (offset, length) in enumerate(_walk(path, file)):
            yield _data(path, file, number, offset, length)


def salvage_records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields what ``read_records`` would have yielded after the first corrupt record.

    A record whose data is damaged is stepped over. Where a length is damaged, so that nobody knows
    where the next record starts, the file is searched for the next length that agrees with its
    checksum. Yields nothing for a file in good order or one that is cut short.

    Raises:
      UserError: There is no such file.
    """
    path = Path(path)
    with _open(path) as file:
        size = file.seek(0, os.SEEK_END)
        offset: int | None = 0
        number = 0
        damaged = False
        while offset is not None and offset < size:
            try:
                length = _length(path, file, size, number, offset)
            except CorruptRecordError:
                damaged = True
                offset = _next_header(file, offset + 1)
                continue
            try:
                data = _data(path, file, number, offset, length)
            except CorruptRecordError:
                damaged = True
            else:
                if damaged:
                    yield data
            offset += length + _OVERHEAD
            number += 1


def locate_records(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yields the offset of each record, in bytes, having read no more than the lengths.

    Raises:
      CorruptRecordError: A length is damaged, or the file ends within a record.
      UserError: There is no such file.
    """
    path = Path(path)
    with _open(path) as file:
        for offset, _ in _walk(path, file):
            yield offset


def index_shard(path: str | os.PathLike[str]) -> int:
    """Returns the number of records of a TFRecord file; see ``locate_records``."""
    return sum(1 for _ in locate_records(path))


def read_record(path: str | os.PathLike[str], number: int, offset: int) -> bytes:
    """Returns the data of record ``number``, which ``locate_records`` found at ``offset``.

    Raises:
      CorruptRecordError: The record is damaged or cut short.
      UserError: There is no such file.
    """
    path = Path(path)
    with _open(path) as file:
        size = file.seek(0, os.SEEK_END)
        length = _length(path, file, size, number, offset)
        return _data(path, file, number, offset, length)


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    # TFRecord rotates and shifts the CRC, since a CRC of data that holds its own CRC is weak.
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return _FOOTER.pack(masked)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _walk(path: Path, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields (offset of the record, length of its data)."""
    size = file.seek(0, os.SEEK_END)
    offset = number = 0
    while offset < size:
        length = _length(path, file, size, number, offset)
        yield offset, length
        offset += length + _OVERHEAD
        number += 1


def _length(path: Path, file: BinaryIO, size: int, number: int, offset: int) -> int:
    """Returns the length of the data of the record at ``offset``, in a file of ``size`` bytes."""
    file.seek(offset)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise CorruptRecordError(path, number, offset, "the file ends within its header")
    if _checksum(header[:8]) != header[8:]:
        raise CorruptRecordError(path, number, offset, "the checksum of its length is wrong")
    length, _ = _HEADER.unpack(header)
    missing = offset + length + _OVERHEAD - size
    if missing > 0:
        raise CorruptRecordError(path, number, offset, f"the file ends {missing} bytes early")
    return length


def _data(path: Path, file: BinaryIO, number: int, offset: int, length: int) -> bytes:
    file.seek(offset + _HEADER.size)
    data = file.read(length)
    if _checksum(data) != file.read(_FOOTER.size):
        raise CorruptRecordError(path, number, offset, "the checksum of its data is wrong")
    return data


def _next_header(file: BinaryIO, start: int) -> int | None:
    """Returns the offset of the first sound header at or after ``start``."""
    file.seek(start)
    rest = file.read()
    # No record has 4 GiB, so the upper half of a length is zeros: look only where those are.
    zeros = rest.find(bytes(4), 4)
    while zeros >= 0:
        header = rest[zeros - 4 : zeros - 4 + _HEADER.size]
        if len(header) == _HEADER.size and _checksum(header[:8]) == header[8:]:
            return start + zeros - 4
        zeros = rest.find(bytes(4), zeros + 1)
    return None
