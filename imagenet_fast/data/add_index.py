"""``prepare --add_index``: indexes of JPEGs, added to the records of shards that are there."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from google.protobuf.message import DecodeError
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, WIDTH
from imagenet_fast.data.jpeg_index import LEAST_PIXELS, index_file, load_jpeg_ops
from imagenet_fast.data.manifest import Manifest, Shard
from imagenet_fast.data.prepare import target_directory

_SUFFIX = ".indexed"
_SPLITS = ("train", "validation", "test")


class Added(NamedTuple):
    """What became of the images: how many JPEGs have an index now, and how many cannot."""

    indexed: int
    unindexed: int


def add_index(
    directory: str | os.PathLike[str], threads: int | None = None, progress: bool = True
) -> Added:
    """Adds an index to each record of a JPEG that has none, as ``prepare`` writes it.

    Each shard is written anew beside the old one, which it then replaces; the directory can be
    trained on after each of them, and an interrupted run may be repeated.

    Args:
      directory: The shards, those of a manifest, which is changed with them, or of another
        converter: ``train-00000-of-01024`` and so on.
      threads: Shards that are written at the same time; by default as many as cores.
      progress: Show a progress bar, in shards.

    Raises:
      UserError: There are no shards, one is damaged or cannot be written, or the native ops cannot
        be compiled.
    """
    directory = target_directory(directory)
    try:
        load_jpeg_ops()
    except OSError as error:
        raise UserError(f"JPEGs cannot be indexed: {error}") from error
    work = _Work(directory)
    pool = ThreadPoolExecutor(threads or cpu_cores())
    with tqdm(total=len(work.files), desc="index", unit=" shards", disable=not progress) as bar:
        try:
            futures = [pool.submit(work.do, file) for file in work.files]
            for future in as_completed(futures):
                future.result()
                bar.update()
        finally:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
    work.finish()
    return Added(work.indexed, work.unindexed)


class _Work:
    """The shards of a directory, several of which are worked on at the same time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest: Manifest | None = None
        self._lock = threading.Lock()  # held to change the manifest or the counts
        self.stopped = False
        self.indexed = self.unindexed = 0
        if (directory / manifests.FILE).exists():
            self._manifest = manifests.read_manifest(directory)
            self.files = [shard.file for shard in self._shards()]
            return
        found = (path.name for split in _SPLITS for path in directory.glob(f"{split}-*-of-*"))
        self.files = sorted(name for name in found if not name.endswith(_SUFFIX))
        if not self.files:
            raise UserError(f"{directory}: has no shards; make them with `imagenet-fast prepare`")

    def do(self, file: str) -> None:
        """Writes a shard anew."""
        path, made = self._directory / file, self._directory / f"{file}{_SUFFIX}"
        try:
            self._settle(path, made)
            counts = [0, 0]
            written = records.write_records(
                made, (self._indexed(record, counts) for record in records.read_records(path))
            )
            with self._lock:
                self.indexed += counts[0]
                self.unindexed += counts[1]
                # First the manifest: a run that ends here finds what it needs to go on.
                self._replace_entry(Shard(file, *written))
                made.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        """Says in the manifest that all is done."""
        if self._manifest:
            source = {**self._manifest.source, "jpeg_index": True}
            done = dataclasses.replace(self._manifest, source=source, unindexed=self.unindexed)
            manifests.write_manifest(done, self._directory)

    def _shards(self) -> list[Shard]:
        assert self._manifest
        return self._manifest.shards

    def _settle(self, path: Path, made: Path) -> None:
        """Checks a shard, or puts in its place what an interrupted run has made of it."""
        if not self._manifest:
            return
        (expected,) = (shard for shard in self._shards() if shard.file == path.name)
        if manifests.sha256(path) == expected.sha256:
            return
        if not made.exists() or manifests.sha256(made) != expected.sha256:
            raise UserError(
                f"{path}: differs from the manifest; see `imagenet-fast prepare --verify`"
            )
        made.replace(path)

    def _indexed(self, record: bytes, counts: list[int]) -> bytes:
        if self.stopped:
            raise CancelledError
        try:
            example = tf.train.Example.FromString(record)
        except DecodeError:
            return record  # Training skips it and counts it.
        fields = example.features.feature
        if JPEG_INDEX not in fields and ENCODED in fields:
            height, width = (
                fields[side].int64_list.value[0] if side in fields else LEAST_PIXELS
                for side in (HEIGHT, WIDTH)
            )
            index = index_file(fields[ENCODED].bytes_list.value[0], height, width)
            if index:
                fields[JPEG_INDEX].bytes_list.value.append(index)
            counts[1] += index == b""
        counts[0] += JPEG_INDEX in fields
        return example.SerializeToString(deterministic=True)

    def _replace_entry(self, shard: Shard) -> None:
        if not self._manifest:
            return
        splits = {
            name: dataclasses.replace(
                split,
                shards=tuple(shard if own.file == shard.file else own for own in split.shards),
            )
            for name, split in self._manifest.splits.items()
        }
        self._manifest = dataclasses.replace(self._manifest, splits=splits)
        manifests.write_manifest(self._manifest, self._directory)
