"""Atomic file writes, and line files that stay readable after a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.outside import check_types, named_errors, parse_json, read_bounded
from imagenet_fast.base.paths import Path, is_local, seconds_between_writes, to_path

# Bytes and lines of a file of lines: more than a run writes.
_MOST_BYTES = 2**27
_MOST_LINES = 2**19


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, as :func:`written_whole`."""
    with written_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file under a temporary name beside ``path``, to which it is renamed at the end.

    After an error it is removed. An ``OSError`` of the system then names ``path``.
    """
    temporary = temporary_beside(path)
    try:
        with open_new(temporary) as file:
            yield file
        temporary.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.strerror:
            error.filename, error.filename2 = str(path), None
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_beside(path: Path) -> Path:
    """Returns a unique temporary path in the folder of ``path``."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def open_new(path: Path) -> IO[bytes]:
    """Opens a file to write that must not exist, not even as a link to another one."""
    return path.open("xb" if is_local(path) else "wb")


def open_to_append(path: pathlib.Path) -> IO[bytes]:
    """Opens a local file to read and to append to, creating it unless it exists.

    Raises:
      OSError: if it is a link, through which another file would be written, or a pipe.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "is a link, through which nothing is written"
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(opened, "a+b")


def write_results(directory: str | os.PathLike[str], texts: Mapping[str, str]) -> list[str]:
    """Writes several files and returns their paths.

    Args:
      directory: the directory, created if it does not exist.
      texts: each file's content, by file name.

    Raises:
      UserError: if a file cannot be written.
    """
    paths = [to_path(directory, name) for name in texts]
    try:
        to_path(directory).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values()):
            write_file(path, text)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return list(map(str, paths))


def check_results(directory: str | os.PathLike[str]) -> None:
    """Checks, before long work, that :func:`write_results` can write to a directory.

    Args:
      directory: the directory, created if it does not exist.

    Raises:
      UserError: if no file can be written there.
    """
    path = temporary_beside(to_path(directory, "writable"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open_new(path).close()
        path.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to {directory}: {error.strerror}; choose another output_dir"
        ) from None


def new_path(path: str | os.PathLike[str], otherwise: str) -> Path:
    """Returns the path of a new file or directory. If it exists, an error advises ``otherwise``.

    Raises:
      UserError: if the path exists, cannot be created, or could not be read by TensorFlow.
    """
    path = to_path(path)
    if path.exists():
        raise UserError(f"{path} already exists; remove it, or {otherwise}")
    check_no_pattern(path)
    if is_local(path):
        parent = next(own for own in path.absolute().parents if own.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"cannot write {path}: {parent} is not a writable directory")
    return path


def check_no_pattern(path: Path) -> None:
    """Checks that a path contains no glob characters, because TensorFlow reads paths as patterns.

    Raises:
      UserError: if it contains one.
    """
    if any(character in str(path) for character in "*?[\\"):
        raise UserError(
            f"{path}: TensorFlow cannot read files from paths with *, ?, [ or \\; choose a path "
            "without these characters"
        )


class LineFile:
    """A text file to which lines are appended. The first ones replace any existing content.

    Raises:
      OSError: if the file cannot be written; all methods raise it.
    """

    def __init__(self, path: Path, lines: Iterable[str]) -> None:
        write_file(path, "".join(f"{line}\n" for line in lines))
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._pause = seconds_between_writes(path)
        self._written = time.monotonic()

    def add(self, line: str) -> None:
        """Appends a line. In a bucket it is visible after :meth:`flush`, or some seconds."""
        with named_errors(self._path):
            self._file.write(f"{line}\n")
        if time.monotonic() - self._written >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are still buffered."""
        with named_errors(self._path):
            self._file.flush()
        self._written = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        with named_errors(self._path):
            self._file.close()


def whole_lines(path: Path) -> list[str]:
    """Returns a file's complete lines, without an unfinished last one; none if it is missing."""
    *lines, _ = _split_lines(path)
    return [line.decode(errors="replace").rstrip("\r") for line in lines]


def read_objects(path: Path, types: Mapping[str, Any], others: Any = Any) -> list[dict[str, Any]]:
    """Returns the objects of a JSON Lines file; none if the file is missing.

    Damaged lines, and objects without the required values, are skipped with one warning. An
    unfinished last line, as after a kill, is skipped silently.

    The values of required keys have ``types``, all others one of ``others``.
    """
    *lines, end = _split_lines(path)
    objects, bad = [], 0
    for number, line in enumerate([*lines, end]):
        try:
            value = parse_json(line, dict[str, Any])
            check_types(value, types, others)
            objects.append(value)
        except ValueError:
            bad += number < len(lines)
    if bad:
        lines_are = "1 line is" if bad == 1 else f"{bad} lines are"
        warn_once(f"WARNING: {path}: {lines_are} damaged and skipped; {len(objects)} can be read")
    return objects


def _split_lines(path: Path) -> list[bytes]:
    """Returns a file's lines; the last one is empty or unfinished. None is as an empty file."""
    content = read_bounded(path, _MOST_BYTES) if path.exists() else b""
    if content.count(b"\n") > _MOST_LINES:
        raise OSError(errno.EFBIG, f"has more than {_MOST_LINES:,} lines", str(path))
    return content.split(b"\n")
