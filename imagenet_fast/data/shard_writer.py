"""Conversion of a source's images to shards, several shards in parallel threads."""

from __future__ import annotations

import collections
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import metadata, records
from imagenet_fast.data.baseline_jpegs import is_progressive, to_baseline
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.image_limit import ImageLimit
from imagenet_fast.data.images import BadImageError
from imagenet_fast.data.manifest import Shard, Skipped
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.prepare_journal import Done, unwritable
from imagenet_fast.data.prepare_plan import Task
from imagenet_fast.data.sources import Item, Source

_BAD_IMAGES_SHOWN = 5
# Returns the JPEG index of an image file, given its height and width: ``jpeg_index.index_file``.
Indexer = Callable[[bytes, int, int], Optional[bytes]]


class ShardWriter:
    """Writes shards in parallel threads: reading and codecs release Python's global lock."""

    def __init__(
        self,
        source: Source,
        directory: Path,
        preparation: Preparation,
        jpegtran: str | None,
        indexer: Indexer | None,
        threads: int,
        bad_limit: ImageLimit,
        progress: bool,
    ) -> None:
        self._source = source
        self._directory = directory
        self._preparation = preparation
        self._jpegtran = jpegtran
        self._indexer = indexer
        self._threads = threads
        self._bad_limit = bad_limit
        self._images = sum(source.splits.values())
        self._progress = progress
        self._lock = threading.Lock()  # for skipped images, the progress bar and the journal
        self._skipped: list[Skipped] = []
        self._stopped = False

    def run(self, tasks: list[Task], done: list[Done], finish: Callable[[Done], None]) -> None:
        """Writes the shards of ``tasks``.

        Args:
          tasks: The shards to write.
          done: Shards of earlier runs, for the progress bar and the limit on bad images.
          finish: Called with each shard once it has its final name; calls do not overlap.
        """
        self._skipped += [skipped for shard in done for skipped in shard.skipped]
        self._check_skipped()
        import tensorflow  # noqa: F401  (takes seconds, which the progress bar should not count)

        before = sum(shard.images for shard in done)
        self._bar = tqdm(
            desc=self._source.name,
            total=before + sum(len(task.places) for task in tasks),
            initial=before,
            unit=" images",
            disable=not self._progress,
        )
        pool = ThreadPoolExecutor(self._threads)
        with self._bar, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # about metadata that is not used
            try:
                futures = [pool.submit(self._make, task, finish) for task in tasks]
                for future in as_completed(futures):
                    future.result()
            finally:
                self._stopped = True  # after an error or Ctrl-C, do not finish shards
                pool.shutdown(cancel_futures=True)

    def _make(self, task: Task, finish: Callable[[Done], None]) -> None:
        """Writes one shard, in a thread of the pool."""
        path = self._directory / task.file
        counts = [0] * len(self._source.labels)
        converted: collections.Counter[str] = collections.Counter()
        skipped: list[Skipped] = []
        rows: list[tuple] = []
        unindexed = 0
        splits = list(self._source.splits)

        def examples() -> Iterator[bytes]:
            nonlocal unindexed
            for number, index in task.places.tolist():
                if self._stopped:
                    raise CancelledError
                item = self._read(splits[number], index)
                try:
                    record, lacks_index = self._convert(item, converted, rows)
                    yield record
                    unindexed += lacks_index
                    counts[item.label] += 1
                except BadImageError as error:
                    skipped.append(self._skip(task.split, item, error))
                with self._lock:
                    self._bar.update()

        try:
            written = records.write_records(path, examples())
            shard = Shard(task.file, written.examples, written.bytes, written.sha256)
            packed = metadata.pack(rows)
            with self._lock:
                finish(
                    Done(
                        task.split,
                        shard,
                        counts,
                        dict(converted),
                        skipped,
                        task.digest,
                        packed,
                        unindexed,
                    )
                )
        except OSError as error:
            raise unwritable(path, error) from error

    def _read(self, split: str, index: int) -> Item:
        try:
            item = self._source.read(split, index)
        except OSError as error:
            raise UserError(f"{self._source.name}: cannot be read: {error}") from error
        if not 0 <= item.label < len(self._source.labels):
            raise UserError(
                f"{self._source.name}: {item.filename} in {split} has the label {item.label}, "
                f"outside 0..{len(self._source.labels) - 1}"
            )
        return item

    def _convert(
        self, item: Item, converted: collections.Counter[str], rows: list[tuple]
    ) -> tuple[bytes, bool]:
        """Returns a record, and whether its JPEG lacks an index it should have."""
        if isinstance(item.image, BadImageError):
            raise item.image
        image = self._preparation.encoded(item.image)
        if self._jpegtran and is_progressive(image):
            image = to_baseline(image, self._jpegtran)
        if image.converted_from:
            converted[image.converted_from] += 1
        index = self._indexer(image.data, image.height, image.width) if self._indexer else None
        synsets = self._source.synsets
        record = encode_example(
            image.data,
            label=item.label,
            text=self._source.labels[item.label],
            synset=synsets[item.label] if synsets else None,
            filename=item.filename,
            height=image.height,
            width=image.width,
            channels=image.channels,
            jpeg_index=index or b"",
        )
        rows.append(metadata.describe(image, item.label, len(record)))
        return record, index == b""

    def _skip(self, split: str, item: Item, error: BadImageError) -> Skipped:
        skipped = Skipped(split, item.filename, str(error))
        with self._lock:
            self._skipped.append(skipped)
        self._check_skipped()
        return skipped

    def _check_skipped(self) -> None:
        limit = self._bad_limit.images(self._images)
        if len(self._skipped) <= limit:
            return
        examples = "; ".join(
            f"{skipped.file}: {skipped.reason}" for skipped in self._skipped[:_BAD_IMAGES_SHOWN]
        )
        of = "" if self._bad_limit.count is not None else f"={self._bad_limit} of {self._images}"
        raise UserError(
            f"{self._source.name}: more than {counted(limit, 'image')} (max_bad_images{of}) cannot "
            f"be used, such as {examples}"
        )
