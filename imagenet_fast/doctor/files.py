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
from imagenet_fast.base.paths import Path, is_local, to_path
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
    """Writes a file in ``model_dir``, renames it and reads it, as for a checkpoint.

    Nothing stays there. Where the folder does not exist, that is done in the one around it.
    """
    if not options.model_dir:
        return []
    directory = to_path(options.model_dir)
    content = os.urandom(_WRITTEN)
    try:
        check_no_pattern(directory)
        with _trial_folder(directory) as folder:
            start = time.perf_counter()
            write_file(folder / "trial", content)  # beside its place, then renamed
            seconds = time.perf_counter() - start
            if (folder / "trial").read_bytes() != content:
                return [wrong("model_dir", f"{directory} gives back other bytes", _WRITABLE)]
    except UserError as error:
        return [refused("model_dir", error)]
    except OSError as error:
        reason = error.strerror or str(error)
        return [wrong("model_dir", f"cannot write in {directory}: {reason}", _WRITABLE)]
    told = (
        f"{directory}: {_WRITTEN / 1e6:.0f} MB written and renamed in {1e3 * seconds:.0f} ms"
        f"{_free(directory)}"
    )
    return [ok("model_dir", told, bytes=_WRITTEN, seconds=seconds)]


def check_temporary_files(_: SharedOptions) -> list[Finding]:
    """Writes where all workers but the chief write their part of a checkpoint; silent if it works.

    The native resize is compiled there, too.
    """
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_WRITTEN))
            file.flush()
    except OSError as error:
        told = f"cannot write {_WRITTEN / 1e6:.0f} MB in {folder}: {error.strerror or error}"
        return [wrong("temporary files", told, "make room there, or name another folder in TMPDIR")]
    return []


def check_data_dir(options: DataOptions) -> list[Finding]:
    """Reads the manifest of ``data_dir``, the sizes of its shards and the first records."""
    if not options.data_dir:
        return []
    directory = to_path(options.data_dir)
    try:
        shards, told = _shards(directory)
        records, size, seconds = _read(shards)
    except UserError as error:
        return [refused("data_dir", error)]
    except OSError as error:
        return [wrong("data_dir", f"cannot read {directory}: {error.strerror or error}", _READABLE)]
    speed = size / seconds / 1e6
    told = f"{directory}: {told}; {records} records read, {speed:.0f} MB/s"
    return [ok("data_dir", told, records=records, megabytes_per_second=speed)]


def _shards(directory: Path) -> tuple[list[Path], str]:
    """Returns the training shards of a data set, and what is to be said of it.

    Raises:
      OSError, UserError: if there are none, or they are not those of the manifest.
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
    return [directory / own.file for own in shards], f"{manifest.name}, all shards complete"


@contextlib.contextmanager
def _trial_folder(directory: Path) -> Iterator[Path]:
    """Makes a folder of this process' own in a directory, or where that could be, and removes it.

    So workers of one run are not in each other's way.
    """
    name = f".imagenet_fast_doctor_{socket.gethostname()}_{os.getpid()}"
    if is_local(directory):
        directory = directory.absolute()
        parents = itertools.chain([directory], directory.parents)
        folder = next(own for own in parents if own.exists()) / name
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
        return
    folder = directory / name  # A bucket has no folders that must exist.
    folder.mkdir()
    try:
        yield folder
    finally:
        tf.io.gfile.rmtree(str(folder))


def _free(directory: Path) -> str:
    """Tells the free space of a local disk."""
    if not isinstance(directory, pathlib.Path):
        return ""
    parents = itertools.chain([directory.absolute()], directory.absolute().parents)
    free = shutil.disk_usage(next(own for own in parents if own.exists())).free
    return f", {free / 1e9:.0f} GB free"


def _read(shards: Sequence[Path]) -> tuple[int, int, float]:
    """Reads the first records.

    Returns:
      Their number, their bytes, and the seconds it took.

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
    if isinstance(path, pathlib.Path):
        _forget(path)
    yield from read_records(path)


def _forget(path: pathlib.Path) -> None:
    """Has the system drop a file from its cache, so that a read is one of the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
