"""Reading and writing of TFRecord files in Python, without TensorFlow.

A record consists of its length (uint64), the length's checksum, the data, and the data's checksum;
both checksums are "masked" CRC-32C. Errors name the damaged record and its offset;
``shards.read_shard`` can read the records after it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import IO, NamedTuple, TypeVar

import google_crc32c

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import open_new, temporary_beside
from imagenet_fast.base.paths import Path, is_local, to_path

HEADER = struct.Struct("<QI")  # length, masked checksum of the length's 8 bytes
FOOTER = struct.Struct("<I")  # masked checksum of the data
OVERHEAD = HEADER.size + FOOTER.size
# Added to the rotated CRC to mask it.
CRC_MASK = 0xA282EAD8

# The start of a note in place of a lost record; no example starts so.
LOST = b"\xff lost record"

# Before each retry of a failed read, in seconds.
_PAUSES = (1.0, 2.0, 4.0)
# Not retried.
_PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_Result = TypeVar("_Result")


class CorruptRecordError(UserError):
    """A shard cannot be read past this record: the message names the file, record and offset."""

    def __init__(self, path: Path, record: int, offset: int, reason: str, missing: int = 0) -> None:
        super().__init__(f"{path}: record {record}, at byte {offset}, is corrupt: {reason}")
        self.path = path
        self.record = record
        self.offset = offset
        self.reason = reason
        self.missing = missing  # bytes of the record after the end of the file


class LostRecord(NamedTuple):
    """A record that cannot be read: its index, offset in bytes, the reason, the shard's path."""

    record: int
    offset: int
    reason: str
    shard: str


def lost_record(record: bytes) -> LostRecord | None:
    """Parses a note in place of a lost record; returns None for any other record."""
    if not record.startswith(LOST):
        return None
    _, number, offset, reason, shard = record.decode(errors="replace").split("\n", 4)
    return LostRecord(int(number), int(offset), reason, shard)


class Written(NamedTuple):
    """A file by ``write_records``: number of records, size in bytes and hex SHA-256."""

    examples: int
    bytes: int
    sha256: str


def write_records(path: str | os.PathLike[str], records: Iterable[bytes]) -> Written:
    """Writes a TFRecord file atomically: under a temporary name, then renamed.

    Args:
      path: the file to create or replace. Its directory must exist.
      records: the data of each record. If iterating raises, the temporary file is removed.
    """
    path = to_path(path)
    temporary = temporary_beside(path)
    digest = hashlib.sha256()
    examples = size = 0
    try:
        with open_new(temporary) as file:
            for data in records:
                length = struct.pack("<Q", len(data))
                frame = b"".join((length, _checksum(length), data, _checksum(data)))
                file.write(frame)
                digest.update(frame)
                examples += 1
                size += len(frame)
                del data, frame  # which may be large, before the next one is made
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Written(examples, size, digest.hexdigest())


def remove_unfinished(directory: Path, names: Collection[str]) -> None:
    """Removes the temporary files that killed processes left of files to be written.

    No other process may be writing them.
    """
    for left in directory.glob(".*.tmp"):
        if left.name[1:].rsplit(".", 2)[0] in names:
            left.unlink(missing_ok=True)


def read_records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields the data of each record of a TFRecord file, after verifying both checksums.

    Raises:
      CorruptRecordError: at the first record that is damaged or truncated.
      UserError: there is no such file.
    """
    with _File(path) as file:
        for number, (offset, length) in enumerate(_walk(file)):
            yield _data(file, number, offset, length)


def locate_records(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yields the offset of each record, in bytes; reads only the lengths.

    Raises:
      CorruptRecordError: a length is damaged, or the file ends within a record.
      UserError: there is no such file.
    """
    with _File(path) as file:
        for offset, _ in _walk(file):
            yield offset


def index_shard(path: str | os.PathLike[str]) -> int:
    """Returns the number of records of a TFRecord file; see ``locate_records``."""
    return sum(1 for _ in locate_records(path))


def read_record(path: str | os.PathLike[str], number: int, offset: int) -> bytes:
    """Returns the data of record ``number``, at an ``offset`` from ``locate_records``.

    Raises:
      CorruptRecordError: the record is damaged or truncated.
      UserError: there is no such file.
    """
    with _File(path) as file:
        length = _length(file, number, offset)
        return _data(file, number, offset, length)


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    # TFRecord masks the CRC, because a CRC of data that contains its own CRC is weak.
    masked = (((crc >> 15) | (crc << 17)) + CRC_MASK) & 0xFFFFFFFF
    return FOOTER.pack(masked)


class _File:
    """A file whose reads are retried, as for a server that is briefly unavailable.

    Args:
      path: of the file.

    Raises:
      UserError: it cannot be read after all retries; each method raises it.

    Attributes:
      path: of the file.
      size: in bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = to_path(path)
        self._file: IO[bytes] | None = None
        self.size = self._retry(lambda file: file.seek(0, os.SEEK_END))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def read(self, offset: int, length: int = -1) -> bytes:
        """Returns ``length`` bytes, or fewer at the end of the file; by default all."""

        def read(file: IO[bytes]) -> bytes:
            file.seek(offset)
            return file.read(length)

        return self._retry(read)

    def _retry(self, action: Callable[[IO[bytes]], _Result]) -> _Result:
        pauses = iter(_PAUSES)
        while True:
            try:
                if self._file is None:
                    if is_local(self.path) and self.path.exists() and not self.path.is_file():
                        raise UserError(f"{self.path}: is not a regular file")
                    self._file = self.path.open("rb")
                return action(self._file)
            except OSError as error:
                self._close()
                pause = next(pauses, None)
                if pause is None or isinstance(error, _PERMANENT):
                    raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
            time.sleep(pause)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _walk(file: _File) -> Iterator[tuple[int, int]]:
    """Yields (offset of the record, length of its data)."""
    offset = number = 0
    while offset < file.size:
        length = _length(file, number, offset)
        yield offset, length
        offset += length + OVERHEAD
        number += 1


def _length(file: _File, number: int, offset: int) -> int:
    """Returns the length of the data of the record at ``offset``."""
    header = file.read(offset, HEADER.size)
    if len(header) < HEADER.size:
        raise CorruptRecordError(file.path, number, offset, "the file ends within its header")
    if _checksum(header[:8]) != header[8:]:
        raise CorruptRecordError(file.path, number, offset, "the checksum of its length is wrong")
    length, _ = HEADER.unpack(header)
    missing = offset + length + OVERHEAD - file.size
    if missing > 0:
        reason = f"the file ends {missing} bytes early"
        raise CorruptRecordError(file.path, number, offset, reason, missing)
    return length


def _data(file: _File, number: int, offset: int, length: int) -> bytes:
    start = offset + HEADER.size
    data = file.read(start, length)
    if _checksum(data) != file.read(start + length, FOOTER.size):
        raise CorruptRecordError(file.path, number, offset, "the checksum of its data is wrong")
    return data
