"""Files that are never there in part."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import Path, is_local, seconds_between_writes, to_path


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file beside its place and renames it, so that it is never there in part."""
    temporary = temporary_beside(path)
    with _named(path):
        try:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def temporary_beside(path: Path) -> Path:
    """Returns a name for what is to be renamed to ``path``, which nobody else has."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file in errors of the system's, which those of a full disk do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_results(directory: str | os.PathLike[str], texts: Mapping[str, str]) -> list[str]:
    """Writes several files and returns their paths.

    Args:
      directory: where; made if it does not exist.
      texts: what is in each file, by its name.

    Raises:
      UserError: if they cannot be written.
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
    """Checks that :func:`write_results` will be able to write, before work that takes long.

    Args:
      directory: where; made if it does not exist.

    Raises:
      UserError: if nothing can be written there.
    """
    path = to_path(directory, ".writable")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        path.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to {directory}: {error.strerror}; choose another output_dir"
        ) from None


def new_path(path: str | os.PathLike[str], otherwise: str) -> Path:
    """Returns the path of something to write, at which there must be nothing yet.

    Args:
      path: the path.
      otherwise: what the user can do other than to remove what is there.

    Raises:
      UserError: if there is something, nothing can be made there, or TensorFlow could not read it.
    """
    path = to_path(path)
    if path.exists():
        raise UserError(f"{path} exists already; remove it, or {otherwise}")
    check_no_pattern(path)
    if is_local(path):
        parent = next(own for own in path.absolute().parents if own.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"cannot write {path}: {parent} is no folder that can be written to")
    return path


def check_no_pattern(path: Path) -> None:
    """Checks that TensorFlow, which takes paths of what it reads for patterns, will find a path.

    Raises:
      UserError: if not.
    """
    if any(character in str(path) for character in "*?[\\"):
        raise UserError(
            f"{path}: TensorFlow does not find files again in paths with *, ?, [ or \\; give a "
            "path without these"
        )


class LineFile:
    """A file to which lines are added, each of which is there as a whole or not at all.

    Args:
      path: of the file.
      lines: with which it begins, instead of those that are there.

    Raises:
      OSError: if it cannot be written; each method raises it.
    """

    def __init__(self, path: Path, lines: Iterable[str]) -> None:
        write_file(path, "".join(f"{line}\n" for line in lines))
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._pause = seconds_between_writes(path)
        self._written = time.monotonic()

    def add(self, line: str) -> None:
        """Adds a line, which in a bucket is there only after some time, or :meth:`flush`."""
        with _named(self._path):
            self._file.write(f"{line}\n")
        if time.monotonic() - self._written >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are still in memory."""
        with _named(self._path):
            self._file.flush()
        self._written = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        with _named(self._path):
            self._file.close()


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file but one that a kill has cut short; none if there is no file."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def read_objects(path: Path, types: Mapping[str, type]) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that has one in each line; none if there is no file.

    Lines that are damaged or hold something else are left out, which is reported once. Nothing is
    said of a last line that a kill has cut short.

    Args:
      path: of the file.
      types: of the values that each object must have, by their keys.
    """
    *lines, end = path.read_bytes().split(b"\n") if path.exists() else [b""]
    objects, bad = [], 0
    for number, line in enumerate([*lines, end]):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and all(isinstance(value.get(k), types[k]) for k in types):
            objects.append(value)
        elif number < len(lines):
            bad += 1
    if bad:
        told = "1 line is" if bad == 1 else f"{bad} lines are"
        warn_once(f"WARNING: {path}: {told} damaged and left out; {len(objects)} can be read")
    return objects
