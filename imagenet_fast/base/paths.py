"""Local paths, and paths in Google Cloud Storage (``gs://BUCKET/...``).

:func:`to_path` converts all paths that users give. Local ones are ``pathlib``'s.
:class:`BucketPath` has the part of that interface that this package needs, raises ``OSError`` like
``pathlib``, and uses TensorFlow's client, as TensorFlow's own reads and writes do.

PyPI's ``etils.epath`` has more of the interface, but raises TensorFlow's errors, needs permissions
on the bucket itself, and replaces ``pathlib`` for local paths, too. ``universal-pathlib`` with
``gcsfs`` would add a second client with separate credentials, since TensorFlow's still reads the
shards and checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Union

from imagenet_fast.base.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

_SCHEME = "gs://"
_ANY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECONDS_BETWEEN_UPLOADS = 30.0
# TensorFlow's __init__.py loads the package.
_NO_BUCKETS = (
    "this TensorFlow has no Google Cloud Storage: install the package tensorflow-io-gcs-filesystem "
    "(pip install tensorflow-io-gcs-filesystem) and set TF_USE_MODULAR_FILESYSTEM=1, so that "
    "TensorFlow loads it; or use local paths"
)
# The service's message within TensorFlow's.
_REASON = re.compile(r'"message": "(.*?)"')


class BucketError(OSError, UserError):
    """A failed operation on a path in a bucket; also a ``UserError``, if nothing catches it."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class _NameError(BucketError):
    """A path that can be neither local nor in a bucket."""


class _MissingError(BucketError, FileNotFoundError):
    pass


class _AccessError(BucketError, PermissionError):
    pass


class BucketPath(pathlib.PurePosixPath):
    """A file or a folder in a bucket.

    Buckets have no real folders: a folder exists if an object's name begins with it, or if
    :meth:`mkdir` has written a placeholder object. A written file appears, complete, once it is
    closed.

    The methods behave as those of ``pathlib.Path``. All of them, including :meth:`exists`, also
    raise :class:`BucketError` if the bucket does not exist or permits no access, or if the service
    is unavailable.
    """

    def __str__(self) -> str:
        return super().__str__().replace("gs:/", _SCHEME, 1)

    def absolute(self) -> BucketPath:
        """Returns the same path."""
        return self

    resolve = absolute

    def stat(self) -> os.stat_result:
        """Returns ``st_mode`` (a file's or a directory's), ``st_size`` and ``st_mtime``."""
        with _explained(self) as gfile:
            found = gfile.stat(str(self))
        mode = stat.S_IFDIR if found.is_directory else stat.S_IFREG
        changed = found.mtime_nsec // 10**9
        return os.stat_result((mode, 0, 0, 0, 0, 0, found.length, 0, changed, 0))

    def exists(self) -> bool:
        """Whether the file or folder exists."""
        return self._mode() != 0

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self._mode())

    def is_file(self) -> bool:
        """Whether it is a file."""
        return stat.S_ISREG(self._mode())

    def is_symlink(self) -> bool:
        """Buckets have no links."""
        return False

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def iterdir(self) -> Iterator[BucketPath]:
        """Yields the folder's entries."""
        with _explained(self) as gfile:
            names = gfile.listdir(str(self))
        yield from (self / name for name in names)

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yields the folder's own entries with a matching name."""
        if self.is_dir():
            yield from (path for path in self.iterdir() if path.match(pattern))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Creates a folder; its parents need not exist."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        # Not the parents: for them TensorFlow needs permissions on the bucket itself. It also
        # creates the parent of a file that it writes, unless there is one, as there is from now on.
        if len(self.parts) > 2:
            with _explained(self) as gfile:
                gfile.mkdir(str(self))

    def open(self, mode: str, encoding: str = "utf-8") -> IO:
        """Opens the file in mode rb, wb, ab, w or a."""
        # Any, because RawIOBase is not an IO to type checkers.
        file: Any = _BucketFile(self, mode if "b" in mode else f"{mode}b")
        if mode == "rb":
            return io.BufferedReader(file)  # RawIOBase reads lines byte by byte
        return file if "b" in mode else io.TextIOWrapper(file, encoding)

    def read_bytes(self) -> bytes:
        """Returns the file's content."""
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Returns the file's content as text."""
        return self.read_bytes().decode(encoding)

    def replace(self, target: str | os.PathLike[str]) -> Path:
        """Renames a file, or a folder file by file, and returns the new path."""
        with _explained(self) as gfile:
            gfile.rename(str(self), str(target), overwrite=True)
        return to_path(target)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        try:
            with _explained(self) as gfile:
                gfile.remove(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise


Path = Union[pathlib.Path, BucketPath]


def to_path(*parts: str | os.PathLike[str]) -> Path:
    """Joins parts into a path.

    Expands ``~`` in local paths, because shells do not after ``--flag=``.

    Raises:
      UserError: (also an ``OSError``) for other schemes, such as ``s3://...``, for which pathlib
        would create a folder, and for ``~`` if the home directory is unknown.
    """
    first = os.fspath(parts[0])
    if first.startswith(_SCHEME):
        return BucketPath(*parts)
    scheme = _ANY_SCHEME.match(first)
    if scheme:
        reason = (
            f"{scheme[0]} is not supported, only local paths, without a scheme, and "
            f"{_SCHEME}BUCKET/..., in Google Cloud Storage: copy or mount the files"
        )
        raise _NameError(errno.EPROTONOSUPPORT, reason, first)
    # pathlib would raise an error for ~name if there is no such user, and expand ./~, too.
    expanded = os.path.expanduser(first)  # noqa: PTH111
    # For example in a container whose user has no name.
    if first.partition("/")[0] == "~" == expanded.partition("/")[0]:
        reason = "the home directory is unknown: set HOME, or give a path without ~"
        raise _NameError(errno.ENOENT, reason, first)
    return pathlib.Path(expanded, *parts[1:])


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is local."""
    return isinstance(to_path(path), pathlib.Path)


def to_local_path(path: str | os.PathLike[str], name: str, advice: str = "") -> pathlib.Path:
    """Returns a path that must be local.

    Args:
      path: the path.
      name: the option that gives the path, for the message.
      advice: text appended to the message.

    Raises:
      UserError: if it is in a bucket.
    """
    path = to_path(path)
    if isinstance(path, pathlib.Path):
        return path
    raise UserError(f"{name} is {path}, but must be a local path" + advice)


def seconds_between_writes(path: Path) -> float:
    """Returns how long to buffer lines that are appended to a file.

    In a bucket each write uploads the whole file, at most once a second.
    """
    return 0.0 if isinstance(path, pathlib.Path) else _SECONDS_BETWEEN_UPLOADS


def bucket_error(path: str, error: tf.errors.OpError) -> BucketError:
    """Converts TensorFlow's error about a path in a bucket."""
    import tensorflow as tf

    message = _REASON.search(error.message)
    reason = message[1] if message else error.message.strip().splitlines()[0]
    if isinstance(error, tf.errors.NotFoundError):
        if "bucket does not exist" in reason:
            # Not a FileNotFoundError, which callers treat as an absent file.
            bucket = f"{_SCHEME}{path[len(_SCHEME) :].partition('/')[0]}"
            return BucketError(errno.ENOENT, f"there is no bucket {bucket}", path)
        return _MissingError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if "HTTP response code 401" in error.message:
        advice = (
            f"not authenticated to Google Cloud Storage ({reason}): log in with `gcloud auth "
            "application-default login`"
        )
        return _AccessError(errno.EACCES, advice, path)
    if isinstance(error, tf.errors.PermissionDeniedError):
        advice = (
            f"{os.strerror(errno.EACCES)} ({reason}): the account needs a role in that bucket, "
            "such as Storage Object Admin"
        )
        return _AccessError(errno.EACCES, advice, path)
    return BucketError(errno.EIO, f"Google Cloud Storage failed ({reason})", path)


@contextlib.contextmanager
def _explained(path: BucketPath) -> Iterator[Any]:
    """Gives ``tf.io.gfile``, whose errors it converts into ``OSError``."""
    import tensorflow as tf

    # Wheels for some platforms, and some custom builds, lack it.
    if "gs" not in tf.io.gfile.get_registered_schemes():
        raise BucketError(errno.ENOTSUP, _NO_BUCKETS, str(path))
    try:
        yield tf.io.gfile
    except tf.errors.OpError as error:
        raise bucket_error(str(path), error) from error


class _BucketFile(io.RawIOBase):
    """An open file in a bucket, to read or to write; :meth:`flush` uploads it."""

    def __init__(self, path: BucketPath, mode: str) -> None:
        self._path, self._reads, self._place = path, mode == "rb", 0
        with _explained(path) as gfile:
            self._file = gfile.GFile(str(path), mode)
        if not self._reads:
            self.write(b"")  # Creates the file even if nothing is written.

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return not self._reads

    def seekable(self) -> bool:
        return self._reads

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._read(-1)

    def _read(self, size: int) -> bytes:
        import tensorflow as tf

        with _explained(self._path):
            # Not in seek(), because TensorFlow downloads data at each position.
            if self._file.tell() != self._place:
                try:
                    self._file.seek(self._place)
                except tf.errors.OutOfRangeError:
                    return b""
            data = self._file.read(size)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._place
        elif whence == os.SEEK_END:
            offset += self._path.stat().st_size
        self._place = offset
        return offset

    def tell(self) -> int:
        return self._place

    def write(self, data: Any) -> int:
        with _explained(self._path):
            self._file.write(bytes(data))
        return len(data)

    def flush(self) -> None:
        if self.writable() and not self.closed:
            with _explained(self._path):
                self._file.flush()

    def close(self) -> None:
        if not self.closed:
            super().close()  # Flushes.
            with _explained(self._path):
                self._file.close()
