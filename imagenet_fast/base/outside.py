"""Files that others may have made, read as data: of bounded size, and JSON of checked types."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from imagenet_fast.base.paths import Path

if TYPE_CHECKING:
    import numpy as np

# JSON takes up to 25 times its size in memory.
MAX_JSON = 2**25
# Of the arrays in one file, decompressed.
MAX_ARRAYS = 2**29
# A number that counts something: of images, steps, bytes.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Kind = TypeVar("_Kind")


def read_bounded(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most ``limit`` bytes; follows symbolic links.

    Raises:
      OSError: if it cannot be read, is no regular file (as a pipe, which could block) or is larger.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if found.st_size > limit:
        raise OSError(
            errno.EFBIG, f"has {found.st_size:,} bytes, but may have {limit:,}", str(path)
        )
    with named_errors(path), path.open("rb") as file:
        return file.read(min(limit, found.st_size + 1))  # read(limit) would take that much memory


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Adds the file's name to an ``OSError`` that lacks it, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an ``.npz`` file by name; no pickled objects.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is damaged, or larger than ``MAX_ARRAYS``.
    """
    import numpy as np  # flags are checked without it

    content = io.BytesIO(read_bounded(path, MAX_ARRAYS))
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_ARRAYS:
                raise ValueError(f"has arrays of more than {MAX_ARRAYS:,} bytes")
        with np.load(content) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # of any class, by a header that NumPy parses as Python
        raise ValueError(f"is damaged: {error}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"is damaged: {name} is no array")
    return arrays


def parse_json(content: str | bytes, kind: type[_Kind]) -> _Kind:
    """Returns a JSON text as a value of a type, such as ``list[int]`` or a dataclass.

    Args:
      content: the text, in UTF-8.
      kind: the type; ``msgspec.Meta`` in it bounds numbers, lengths and patterns. Unknown fields of
        a dataclass are ignored.

    Raises:
      ValueError: if it is not JSON in UTF-8, larger than ``MAX_JSON``, nested too deeply, or not of
        this type; the message names the place.
    """
    if len(content) > MAX_JSON:
        raise ValueError(f"has {len(content):,} bytes, but may have {MAX_JSON:,}")
    try:
        # Not msgspec's parser, which refuses names of files that are no UTF-8.
        return as_type(json.loads(content), kind)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def as_type(values: Any, kind: type[_Kind]) -> _Kind:
    """Returns JSON values as a value of a type; see :func:`parse_json`.

    Raises:
      ValueError: if they are not of this type; the message names the place.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def check_types(values: Mapping[str, Any], types: Mapping[str, Any], others: Any = Any) -> None:
    """Checks the values of a JSON object.

    Args:
      values: the object.
      types: required keys and the types of their values.
      others: the type of all other values.

    Raises:
      ValueError: if a key is missing, or a value not of its type.
    """
    for key in {*values, *types}:
        try:
            as_type(values.get(key), types.get(key, others))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def read_json(path: Path, kind: type[_Kind]) -> _Kind:
    """Returns the value in a JSON file; see :func:`parse_json`.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is not JSON of this type.
    """
    return parse_json(read_bounded(path, MAX_JSON), kind)
