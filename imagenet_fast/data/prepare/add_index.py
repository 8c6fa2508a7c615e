"""``prepare --add_index``: adds JPEG indexes to the records of existing shards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from google.protobuf.message import DecodeError
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import open_to_append
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import metadata, records
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, WIDTH
from imagenet_fast.data.jpeg.image_ops import load_image_ops
from imagenet_fast.data.jpeg.index import LEAST_PIXELS, index_file
from imagenet_fast.data.manifest import JOURNAL, Manifest, Shard
from imagenet_fast.data.prepare.job import local_directory
from imagenet_fast.data.prepare.journal import lock, writing

_SUFFIX = manifests.INDEXED_SUFFIX
_LOCK = ".add_index.lock"


class Added(NamedTuple):
    """The number of JPEGs that have an index now, and of those that cannot have one."""

    indexed: int
    unindexed: int


def add_index(
    directory: str | os.PathLike[str], threads: int | None = None, progress: bool = True
) -> Added:
    """Writes into each JPEG's record the index that ``prepare`` writes, replacing older ones.

    Each shard is rewritten beside the old one and then replaces it. Training can read the directory
    at any time, and an interrupted run can be repeated.

    Args:
      directory: the shards, either with a manifest, which is updated, or of another converter:
        ``train-00000-of-01024`` and so on.
      threads: number of shards written in parallel; by default the number of CPU cores.
      progress: whether to show a progress bar, in shards.

    Raises:
      UserError: there are no shards, one is damaged or cannot be written, another process is adding
        indexes, or the native ops cannot be compiled.
    """
    directory = local_directory(directory)
    try:
        load_image_ops()
    except OSError as error:
        raise UserError(f"JPEGs cannot be indexed: {error}") from error
    with _locked(directory):
        indexer = _Indexer(directory)
        records.remove_unfinished(directory, [f"{file}{_SUFFIX}" for file in indexer.files])
        pool = ThreadPoolExecutor(threads or cpu_cores())
        shards = len(indexer.files)
        with tqdm(total=shards, desc="index", unit=" shards", disable=not progress) as bar:
            try:
                futures = [pool.submit(indexer.rewrite, file) for file in indexer.files]
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            finally:
                indexer.stopped = True
                pool.shutdown(cancel_futures=True)
        indexer.finish()
    return Added(indexer.indexed, indexer.unindexed)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps out other processes, which would write the same temporary files."""
    path = directory / _LOCK
    try:
        file = open_to_append(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_shards(directory) from None
    except OSError as error:
        raise UserError(f"{directory}: is not writable: {error.strerror}") from error
    with file:
        lock(file, f"{directory}: another process is adding indexes")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _no_shards(directory: Path) -> UserError:
    return UserError(f"{directory}: has no shards; make them with `imagenet-fast prepare`")


class _Indexer:
    """Rewrites the shards of a directory, several at a time, and updates the manifest."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest: Manifest | None = None
        self._lock = threading.Lock()  # for the manifest and the counts
        self._record_bytes: dict[str, list[int]] = {}  # by shard
        self.stopped = False
        self.indexed = self.unindexed = 0
        if (directory / manifests.FILE).exists():
            self._manifest = self._old_manifest = manifests.read_manifest(directory)
            self.files = [shard.file for shard in self._manifest.shards]
            return
        if (directory / JOURNAL).exists():
            raise UserError(
                f"{directory}: is unfinished: rerun the `imagenet-fast prepare` command that began "
                "it"
            )
        found = (
            path.name for split in manifests.SPLITS for path in directory.glob(f"{split}-*-of-*")
        )
        self.files = sorted(name for name in found if not name.endswith(_SUFFIX))
        if not self.files:
            raise _no_shards(directory)

    def rewrite(self, file: str) -> None:
        """Rewrites a shard."""
        path, rewritten = self._directory / file, self._directory / f"{file}{_SUFFIX}"
        with writing(path):
            self._recover(path, rewritten)
            counts = [0, 0]
            sizes: list[int] = []

            def indexed_records() -> Iterator[bytes]:
                for record in records.read_records(path):
                    record = self._add_index(record, counts)
                    sizes.append(len(record))
                    yield record

            written = records.write_records(rewritten, indexed_records())
            with self._lock:
                self.indexed += counts[0]
                self.unindexed += counts[1]
                self._record_bytes[file] = sizes
                # The manifest first: after a crash here, the next run can tell that the new shard
                # is complete.
                self._update_manifest(Shard(file, *written))
                rewritten.replace(path)

    def finish(self) -> None:
        """Records in the manifest that all shards are indexed, and updates ``data.npz``."""
        if self._manifest:
            source = {**self._manifest.source, "jpeg_index": True}
            done = dataclasses.replace(self._manifest, source=source, unindexed=self.unindexed)
            sizes = [self._record_bytes[file] for file in self.files]
            with writing(self._directory / manifests.FILE):
                metadata.update_record_bytes(self._old_manifest, done, sizes, self._directory)
                manifests.write_manifest(done, self._directory)

    def _recover(self, path: Path, rewritten: Path) -> None:
        """Checks a shard; replaces it if an interrupted run had finished its new version."""
        for file in (path, rewritten):
            if file.exists() and not file.is_file():
                raise UserError(f"{file}: is not a regular file; remove it")
        if not self._manifest:
            return
        (expected,) = (shard for shard in self._manifest.shards if shard.file == path.name)
        if path.exists() and manifests.sha256(path) == expected.sha256:
            return
        if not rewritten.exists() or manifests.sha256(rewritten) != expected.sha256:
            problem = "differs from the manifest" if path.exists() else "is missing"
            raise UserError(f"{path}: {problem}; see `imagenet-fast prepare --verify`")
        rewritten.replace(path)

    def _add_index(self, record: bytes, counts: list[int]) -> bytes:
        """Returns a record with its index; counts JPEGs with an index and those without."""
        if self.stopped:
            raise CancelledError
        try:
            example = tf.train.Example.FromString(record)
        except DecodeError:
            return record  # training skips and counts it
        fields = example.features.feature
        encoded = fields[ENCODED].bytes_list.value if ENCODED in fields else ()
        if encoded:
            index = index_file(encoded[0], _side(fields, HEIGHT), _side(fields, WIDTH))
            fields.pop(JPEG_INDEX, None)
            if index:
                fields[JPEG_INDEX].bytes_list.value.append(index)
            counts[0] += bool(index)
            counts[1] += index == b""
        return example.SerializeToString(deterministic=True)

    def _update_manifest(self, shard: Shard) -> None:
        if not self._manifest:
            return
        splits = {
            name: dataclasses.replace(
                split,
                shards=tuple(shard if old.file == shard.file else old for old in split.shards),
            )
            for name, split in self._manifest.splits.items()
        }
        self._manifest = dataclasses.replace(self._manifest, splits=splits)
        manifests.write_manifest(self._manifest, self._directory)


def _side(fields: Any, name: str) -> int:
    """Returns an image's height or width; a large one if another converter left it out or 0."""
    values = fields[name].int64_list.value if name in fields else ()
    return (values[0] if values else 0) or LEAST_PIXELS
