"""Files that are never there in part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from imagenet_fast.errors import UserError
from imagenet_fast.paths import Path, seconds_between_writes, to_path


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file beside its place and renames it, so that it is never there in part."""
    temporary = path.with_name(path.name + ".tmp")
    if isinstance(content, str):
        temporary.write_text(content)
    else:
        temporary.write_bytes(content)
    temporary.replace(path)


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


def new_path(path: str | os.PathLike[str], otherwise: str) -> Path:
    """Returns the path of something to write, at which there must be nothing yet.

    Args:
      path: the path.
      otherwise: what the user can do other than to remove what is there.

    Raises:
      UserError: if there is something.
    """
    path = to_path(path)
    if path.exists():
        raise UserError(f"{path} exists already; remove it, or {otherwise}")
    return path


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
        self._file = path.open("a")
        self._pause = seconds_between_writes(path)
        self._written = time.monotonic()

    def add(self, line: str) -> None:
        """Adds a line, which in a bucket is there only after some time, or :meth:`flush`."""
        self._file.write(f"{line}\n")
        if time.monotonic() - self._written >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are still in memory."""
        self._file.flush()
        self._written = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file but one that a kill has cut short; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
