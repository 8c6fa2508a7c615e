"""Paths on this machine, and in Google Cloud Storage (``gs://BUCKET/...``).

All directories and files that users name become paths by :func:`to_path`. Those of this machine
are ``pathlib``'s own. Those in buckets have the part of its interface that this package needs, and
raise ``OSError`` as it does; TensorFlow's client does the work, as it does where TensorFlow itself
reads and writes.

PyPI's ``etils.epath`` has more of that interface, but passes on TensorFlow's errors, needs rights
on the bucket itself, and replaces ``pathlib`` for local paths, too. ``universal-pathlib`` with
``gcsfs`` would add a second client with its own credentials: TensorFlow's still reads the shards
and checkpoints.
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
# What loads the package is TensorFlow's __init__.py.
_NO_BUCKETS = (
    "this TensorFlow has no Google Cloud Storage: install the package tensorflow-io-gcs-filesystem "
    "(pip install tensorflow-io-gcs-filesystem) and set TF_USE_MODULAR_FILESYSTEM=1, so that "
    "TensorFlow loads it; or give paths of this machine"
)
# What the service says, in what TensorFlow says.
_REASON = re.compile(r'"message": "(.*?)"')


class BucketError(OSError, UserError):
    """A path in a bucket cannot be used: one that nobody catches tells the user why."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class _NameError(BucketError):
    """A path's name says nothing that this machine or a bucket could have."""


class _MissingError(BucketError, FileNotFoundError):
    pass


class _AccessError(BucketError, PermissionError):
    pass


class BucketPath(pathlib.PurePosixPath):
    """A file or a folder in a bucket.

    A bucket has no folders: one exists if there is something in it, or if :meth:`mkdir` has left an
    object that stands for it. What is written to a file is there once it is closed, all at once.

    The methods do what those of ``pathlib.Path`` do, and raise, beside what these raise,
    :class:`BucketError`, also :meth:`exists` and the like, if there is no such bucket, nobody may
    look into it, or the service cannot be reached.
    """

    def __str__(self) -> str:
        return super().__str__().replace("gs:/", _SCHEME, 1)

    def absolute(self) -> BucketPath:
        """Returns the same path."""
        return self

    resolve = absolute

    def stat(self) -> os.stat_result:
        """Returns what a bucket has of it.

        That is ``st_mode``, that of a file or of a directory, ``st_size``, in bytes, and
        ``st_mtime``, in seconds.
        """
        import tensorflow as tf

        with _explained(self):
            found = tf.io.gfile.stat(str(self))
        mode = stat.S_IFDIR if found.is_directory else stat.S_IFREG
        changed = found.mtime_nsec // 10**9
        return os.stat_result((mode, 0, 0, 0, 0, 0, found.length, 0, changed, 0))

    def exists(self) -> bool:
        """Returns whether there is such a file or folder."""
        return self._mode() != 0

    def is_dir(self) -> bool:
        """Returns whether it is a folder."""
        return stat.S_ISDIR(self._mode())

    def is_file(self) -> bool:
        """Returns whether it is a file."""
        return stat.S_ISREG(self._mode())

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def iterdir(self) -> Iterator[BucketPath]:
        """Yields what is in the folder."""
        import tensorflow as tf

        with _explained(self):
            names = tf.io.gfile.listdir(str(self))
        yield from (self / name for name in names)

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yields what is in the folder itself and has a matching name."""
        if self.is_dir():
            yield from (path for path in self.iterdir() if path.match(pattern))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes a folder; those around it need not exist."""
        import tensorflow as tf

        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        # Not the folders around it: to make those TensorFlow looks at the bucket itself, for which
        # the right to write into it is not enough. So it does for what it writes itself, unless
        # there is a folder for it.
        if len(self.parts) > 2:
            with _explained(self):
                tf.io.gfile.mkdir(str(self))

    def open(self, mode: str, encoding: str = "utf-8") -> IO:
        """Opens the file in one of the modes rb, wb, ab, w and a."""
        # Any: for a type checker a RawIOBase is no IO.
        file: Any = _BucketFile(self, mode if "b" in mode else f"{mode}b")
        return file if "b" in mode else io.TextIOWrapper(file, encoding)

    def read_bytes(self) -> bytes:
        """Returns what is in the file."""
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Returns the text in the file."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        """Writes the file anew."""
        with self.open("wb") as file:
            return file.write(data)

    def write_text(self, data: str, encoding: str = "utf-8") -> int:
        """Writes the file anew."""
        return self.write_bytes(data.encode(encoding))

    def replace(self, target: str | os.PathLike[str]) -> Path:
        """Moves a file to another name, or a folder file by file; returns that name."""
        import tensorflow as tf

        with _explained(self):
            tf.io.gfile.rename(str(self), str(target), overwrite=True)
        return to_path(target)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        import tensorflow as tf

        try:
            with _explained(self):
                tf.io.gfile.remove(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise


Path = Union[pathlib.Path, BucketPath]


def to_path(*parts: str | os.PathLike[str]) -> Path:
    """Returns the path that the parts make together.

    On this machine ``~`` is the user's home: shells see to that, but not behind ``--flag=``.

    Raises:
      UserError: if it is in a place of another kind, as ``s3://...``, which would become a folder
        of that name, or begins with ``~`` where no home directory is known; it is an ``OSError``,
        too.
    """
    first = os.fspath(parts[0])
    if first.startswith(_SCHEME):
        return BucketPath(*parts)
    scheme = _ANY_SCHEME.match(first)
    if scheme:
        told = (
            f"paths of {scheme[0]} are not supported, only paths of this machine, without a "
            f"scheme, and {_SCHEME}BUCKET/..., of Google Cloud Storage: copy or mount what is there"
        )
        raise _NameError(errno.EPROTONOSUPPORT, told, first)
    # pathlib would raise an error for ~name where there is no such user, and expand ./~, too.
    expanded = os.path.expanduser(first)  # noqa: PTH111
    # As in a container whose user has no name.
    if first.partition("/")[0] == "~" == expanded.partition("/")[0]:
        told = "no home directory is known: set HOME, or give a path without ~"
        raise _NameError(errno.ENOENT, told, first)
    return pathlib.Path(expanded, *parts[1:])


def is_local(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is one of this machine."""
    return isinstance(to_path(path), pathlib.Path)


def to_local_path(path: str | os.PathLike[str], name: str, advice: str = "") -> pathlib.Path:
    """Returns a path that must be one of this machine.

    Args:
      path: the path.
      name: of the option that gives it.
      advice: what to do if it is in a bucket.

    Raises:
      UserError: if it is in a bucket.
    """
    path = to_path(path)
    if isinstance(path, pathlib.Path):
        return path
    raise UserError(f"{name} is {path}, but must be on a disk of this machine" + advice)


def seconds_between_writes(path: Path) -> float:
    """Returns how long to keep what is to be added to a file before it is written.

    A bucket takes a file that has grown as a whole, and no more often than once a second.
    """
    return 0.0 if isinstance(path, pathlib.Path) else _SECONDS_BETWEEN_UPLOADS


def bucket_error(path: str, error: tf.errors.OpError) -> BucketError:
    """Returns what TensorFlow's error about a path in a bucket means."""
    import tensorflow as tf

    known = _REASON.search(error.message)
    reason = known[1] if known else error.message.strip().splitlines()[0]
    if isinstance(error, tf.errors.NotFoundError):
        if "bucket does not exist" in reason:
            # Not just a file that is missing: it will be missing wherever one looks.
            bucket = f"{_SCHEME}{path[len(_SCHEME) :].partition('/')[0]}"
            return BucketError(errno.ENOENT, f"there is no bucket {bucket}", path)
        return _MissingError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if "HTTP response code 401" in error.message:
        told = (
            f"Google Cloud Storage does not know who asks ({reason}): log in with `gcloud auth "
            "application-default login`"
        )
        return _AccessError(errno.EACCES, told, path)
    if isinstance(error, tf.errors.PermissionDeniedError):
        told = (
            f"{os.strerror(errno.EACCES)} ({reason}): the account needs a role in that bucket, "
            "such as Storage Object Admin"
        )
        return _AccessError(errno.EACCES, told, path)
    return BucketError(errno.EIO, f"Google Cloud Storage fails ({reason})", path)


@contextlib.contextmanager
def _explained(path: BucketPath) -> Iterator[None]:
    """Turns TensorFlow's errors into ``OSError``."""
    import tensorflow as tf

    # Wheels for some platforms, and builds of one's own, come without it.
    if "gs" not in tf.io.gfile.get_registered_schemes():
        raise BucketError(errno.ENOTSUP, _NO_BUCKETS, str(path))
    try:
        yield
    except tf.errors.OpError as error:
        raise bucket_error(str(path), error) from error


class _BucketFile(io.RawIOBase):
    """A file in a bucket, opened to be read, or to be written; whatever is flushed is there.

    Args:
      path: of the file.
      mode: rb, wb or ab.
    """

    def __init__(self, path: BucketPath, mode: str) -> None:
        import tensorflow as tf

        self._path, self._reads, self._place = path, mode == "rb", 0
        with _explained(path):
            self._file = tf.io.gfile.GFile(str(path), mode)
        if not self._reads:
            self.write(b"")  # So that it is there, even if nothing follows.

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
            # Not earlier: TensorFlow fetches what lies where it is sent.
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
            super().close()  # This flushes.
            with _explained(self._path):
                self._file.close()
