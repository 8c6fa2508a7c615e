"""Files that are never there in part."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from imagenet_fast.errors import UserError


def write_file(path: pathlib.Path, text: str) -> None:
    """Writes a file beside its place and renames it, so that it is never there in part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def write_results(directory: str | os.PathLike[str], texts: Mapping[str, str]) -> list[str]:
    """Writes several files and returns their paths.

    Args:
      directory: where; made if it does not exist.
      texts: what is in each file, by its name.

    Raises:
      UserError: if they cannot be written.
    """
    paths = [pathlib.Path(directory, name) for name in texts]
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values()):
            write_file(path, text)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return list(map(str, paths))
