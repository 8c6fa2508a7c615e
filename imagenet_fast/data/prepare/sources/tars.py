"""Tar archives that others may have made: their regular files, in bounded memory and time."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

# All that describes one member: PAX headers and long names, each of which tarfile reads at once,
# and maps of sparse files. A name and the usual attributes take 2 kB.
_MAX_HEADERS = 2**20
# Attributes of all following members, in PAX global headers; git writes 1.
_MAX_GLOBAL = 100
_DECOMPRESSORS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}


class BadTarError(Exception):
    """What is wrong with an archive."""


@contextlib.contextmanager
def open_tar(
    source: Path | IO[bytes], *, max_members: int, max_unpacked: int | None = None
) -> Iterator[TarReader]:
    """Opens an archive in a context, at whose end it is closed.

    Args:
      source: its path, or a file of it, which stays open.
      max_members: how many members it may have.
      max_unpacked: how many bytes it may have once decompressed from gzip, bzip2 or xz; None if it
        must not be compressed.

    Raises:
      BadTarError: it is not a regular file or not a tar.
    """
    with contextlib.ExitStack() as stack:
        with _explained():
            if not isinstance(source, Path):
                file = source
            elif source.is_file():
                file = stack.enter_context(source.open("rb"))
            else:  # A pipe would block.
                raise BadTarError("it is not a regular file")
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if max_unpacked is not None:
                start = file.read(6)
                file.seek(0)
                for magic, decompressor in _DECOMPRESSORS.items():
                    if start.startswith(magic):
                        file = stack.enter_context(decompressor(file))
                        size = max_unpacked
            guard = _Guard(file, size)
            tar = stack.enter_context(tarfile.open(fileobj=guard, mode="r:"))  # type: ignore[call-overload]
        yield TarReader(tar, guard, max_members)


class TarReader:
    """The regular files in a tar; links, devices and sparse files are left out."""

    def __init__(self, tar: tarfile.TarFile, guard: _Guard, max_members: int) -> None:
        self._tar = tar
        self._guard = guard
        self._max_members = max_members

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yields the archive's regular files.

        Raises:
          BadTarError: it is damaged, has too many members, or ends within one.
        """
        number = 0
        while True:
            with _explained():
                self._guard.allowed = _MAX_HEADERS
                member = self._tar.next()
                if member is None:
                    return
                self._tar.members = []  # type: ignore[attr-defined]  # It would keep millions.
                number += 1
                if number > self._max_members:
                    raise BadTarError(f"it has more than {self._max_members:,} members")
                if len(self._tar.pax_headers) > _MAX_GLOBAL:
                    raise BadTarError(f"it has more than {_MAX_GLOBAL} global attributes")
                is_file = member.isreg() and not member.issparse()
                most = self._guard.size - member.offset_data
                # With a negative size, Python before 2025 reads the same member for ever.
                if member.size < 0 or (is_file and member.size > most):
                    raise BadTarError(
                        f"{_shown(member)} has {member.size:,} bytes, but can have {most:,}"
                    )
            if is_file:
                yield member

    def open(self, member: tarfile.TarInfo) -> IO[bytes]:
        """Returns the file of a member, to be read before the next member."""
        self._guard.allowed = sys.maxsize
        file = self._tar.extractfile(member)
        assert file is not None  # It is a regular file.
        return file

    def read(self, member: tarfile.TarInfo, limit: int) -> bytes:
        """Returns a member's content.

        Raises:
          BadTarError: it has more than ``limit`` bytes or is damaged.
        """
        if member.size > limit:
            raise BadTarError(f"{_shown(member)} has {member.size:,} bytes, but may have {limit:,}")
        with _explained(), self.open(member) as file:
            content = file.read(member.size)
            if len(content) < member.size:
                raise BadTarError(f"it ends within {_shown(member)}")
            return content


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Gives errors one class: ``tarfile`` and the decompressors raise any."""
    try:
        yield
    except BadTarError:
        raise
    except Exception as error:
        raise BadTarError(str(error) or type(error).__name__) from error


def _shown(member: tarfile.TarInfo) -> str:
    return repr(member.name[:100])


class _Guard:
    """The file that ``tarfile`` reads, behind the decompressor if there is one.

    Attributes:
      size: the largest position.
      allowed: how many bytes may be read until this is set again.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.size = size
        self.allowed = _MAX_HEADERS
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.allowed:
            raise BadTarError("what describes a member is too long")
        self.allowed -= size
        return self._file.read(size)

    def seek(self, position: int) -> int:
        # Decompressors seek by reading.
        if not 0 <= position <= self.size:
            raise BadTarError(f"it ends early, or has more than {self.size:,} bytes")
        return self._file.seek(position)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()
