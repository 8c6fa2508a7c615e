"""Checks of files: temporary files, ``model_dir`` and ``data_dir``."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_no_pattern, write_file
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.data.examples import LABEL, decode_example
from imagenet_fast.data.info import check_complete
from imagenet_fast.data.manifest import FILE as MANIFEST
from imagenet_fast.data.manifest import check_sizes, read_manifest
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.records import read_records
from imagenet_fast.doctor.finding import Finding, ok, refused, wrong

_WRITTEN = 8 * 2**20
_READ, _READ_SECONDS = 64 * 2**20, 3.0
_READABLE = "choose another --data_dir, or give this user the rights to read it"
_WRITABLE = "choose a --model_dir that all workers can write to, or give them the rights"


def check_model_dir(options: SharedOptions) -> list[Finding]:
    """Writes, renames, reads and removes a file in ``model_dir``, as for a checkpoint.

    If the folder does not exist, the nearest parent that does is used.
    """
    if not options.model_dir:
        return []
    directory = to_path(options.model_dir)
    content = os.urandom(_WRITTEN)
    try:
        check_no_pattern(directory)
        with _trial_folder(directory) as folder:
            start = time.perf_counter()
            write_file(folder / "trial", content)  # under another name, then renamed
            seconds = time.perf_counter() - start
            if (folder / "trial").read_bytes() != content:
                found = f"{directory}: a file read back differs from what was written"
                return [wrong("model_dir", found, "check this disk, or choose another --model_dir")]
    except UserError as error:
        return [refused("model_dir", error)]
    except OSError as error:
        reason = error.strerror or str(error)
        return [wrong("model_dir", f"cannot write in {directory}: {reason}", _WRITABLE)]
    found = (
        f"{directory}: {_WRITTEN / 1e6:.0f} MB written and renamed in {1e3 * seconds:.0f} ms"
        f"{_free(directory)}"
    )
    return [ok("model_dir", found, bytes=_WRITTEN, seconds=seconds)]


def check_temporary_files(_: SharedOptions) -> list[Finding]:
    """Writes a temporary file; no finding if that works.

    Workers other than the chief write their part of checkpoints there, and the native resize is
    compiled there.
    """
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_WRITTEN))
            file.flush()
    except OSError as error:
        found = f"cannot write {_WRITTEN / 1e6:.0f} MB in {folder}: {error.strerror or error}"
        advice = "make room there, or name another folder in TMPDIR"
        return [wrong("temporary files", found, advice)]
    return []


def check_data_dir(options: DataOptions) -> list[Finding]:
    """Reads the manifest of ``data_dir``, the sizes of its shards and the first records."""
    if not options.data_dir:
        return []
    directory = to_path(options.data_dir)
    try:
        shards, description = _shards(directory)
        records, size, seconds = _read(shards)
    except UserError as error:
        return [refused("data_dir", error)]
    except OSError as error:
        return [wrong("data_dir", f"cannot read {directory}: {error.strerror or error}", _READABLE)]
    speed = size / seconds / 1e6
    found = f"{directory}: {description}; {records} records read, {speed:.0f} MB/s"
    return [ok("data_dir", found, records=records, megabytes_per_second=speed)]


def _shards(directory: Path) -> tuple[list[Path], str]:
    """Returns the training shards of a data set, and its description.

    Raises:
      OSError, UserError: if there are none, or they contradict the manifest.
    """
    if not (directory / MANIFEST).exists() and directory.is_dir():
        paths: list[Path] = sorted(directory.glob("train-*-of-*"))
        if paths:
            check_complete("train", paths)
            empty = next((path for path in paths if not path.stat().st_size), None)
            if empty:
                raise UserError(f"{empty} is empty; remove it or make it again")
            return paths, f"{len(paths)} training shards without a manifest"
    manifest = read_manifest(directory)
    for split in ("train", *manifest.splits):
        check_sizes(manifest, directory, split)
    shards = manifest.splits["train"].shards
    if not manifest.splits["train"].examples:
        raise UserError(f"{directory} has no training images; make the data set again")
    return [directory / shard.file for shard in shards], f"{manifest.name}, all shards complete"


@contextlib.contextmanager
def _trial_folder(directory: Path) -> Iterator[Path]:
    """Makes a folder in a directory, or in its nearest existing parent, and removes it at the end.

    Each process uses another name, so that a run's workers do not interfere.
    """
    name = f".imagenet_fast_doctor_{socket.gethostname()}_{os.getpid()}"
    if isinstance(directory, pathlib.Path):
        directory = _existing(directory)
    folder = directory / name
    folder.mkdir()
    try:
        yield folder
    finally:
        tf.io.gfile.rmtree(str(folder))


def _existing(directory: pathlib.Path) -> pathlib.Path:
    """Returns a directory, or the nearest of its parents that exists."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())


def _free(directory: Path) -> str:
    """Returns the free space of a local disk, as text."""
    if not isinstance(directory, pathlib.Path):
        return ""
    return f", {shutil.disk_usage(_existing(directory)).free / 1e9:.0f} GB free"


def _read(shards: Sequence[Path]) -> tuple[int, int, float]:
    """Reads the first records; returns their number, their bytes, and the seconds it took.

    Raises:
      UserError: if one is damaged.
    """
    count = size = 0
    start = time.perf_counter()
    for record in itertools.chain.from_iterable(map(_records, shards)):
        if not count and LABEL not in decode_example(record):
            raise UserError(f"{shards[0]}: its first record has no {LABEL}")
        count, size = count + 1, size + len(record)
        if size >= _READ or time.perf_counter() - start >= _READ_SECONDS:
            break
    return count, size, time.perf_counter() - start


def _records(path: Path) -> Iterator[bytes]:
    if isinstance(path, pathlib.Path) and hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:  # dropped from the system's cache: the disk is read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield from read_records(path)
