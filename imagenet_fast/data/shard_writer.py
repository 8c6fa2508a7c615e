"""Conversion of a source's images to shards, several shards in parallel."""

from __future__ import annotations

import collections
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import end_with_parent
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
_SECONDS_BETWEEN_UPDATES = 0.2  # of the progress bar
# Returns the JPEG index of an image file, given its height and width: ``jpeg_index.index_file``.
Indexer = Callable[[bytes, int, int], Optional[bytes]]


class ShardWriter:
    """Writes shards in parallel processes, or in threads where a process cannot be forked safely.

    Threads share Python's lock: only reading and codecs release it, so of small images they make
    hardly more than one core does.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        preparation: Preparation,
        jpegtran: str | None,
        indexer: Indexer | None,
        workers: int,
        bad_limit: ImageLimit,
        progress: bool,
    ) -> None:
        self._source = source
        self._directory = directory
        self._preparation = preparation
        self._jpegtran = jpegtran
        self._indexer = indexer
        self._workers = workers
        self._bad_limit = bad_limit
        self._images = sum(source.splits.values())
        self._progress = progress
        self._skipped: list[Skipped] = []
        # What workers tell: the number of images done, and those that they skip. One that is killed
        # may leave a lock locked: this process uses none.
        context = multiprocessing.get_context("fork")
        self._done = context.Value("q", 0)
        self._told = context.SimpleQueue()
        self._stopped = context.RawValue("b", 0)

    def run(
        self,
        tasks: list[Task],
        done: list[Done],
        finish: Callable[[Done], None],
        release: Callable[[], None],
    ) -> None:
        """Writes the shards of ``tasks``.

        Args:
          tasks: The shards to write.
          done: Shards of earlier runs, for the progress bar and the limit on bad images.
          finish: Called with each shard once it has its final name; calls do not overlap.
          release: Called in each worker process, to close what only this one may hold.

        Raises:
          UserError: As ``prepare``, or a worker process was killed.
        """
        self._skipped += [skipped for shard in done for skipped in shard.skipped]
        self._check_skipped()
        import tensorflow  # noqa: F401  (takes seconds, which the progress bar should not count)

        before = sum(shard.images for shard in done)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # about metadata that is not used
            pool, make = self._pool(min(self._workers, len(tasks)), release)
            # Before the bar, whose thread a fork would not have.
            futures = {pool.submit(make, task) for task in tasks}
            with tqdm(
                desc=self._source.name,
                total=before + sum(len(task.places) for task in tasks),
                initial=before,
                unit=" images",
                disable=not self._progress,
            ) as bar:
                self._receive(pool, futures, bar, before, finish)

    def _pool(
        self, workers: int, release: Callable[[], None]
    ) -> tuple[Executor, Callable[[Task], Done]]:
        """Returns workers, and the function that one of them writes a shard by."""
        if workers < 2 or not _can_fork():
            return ThreadPoolExecutor(max(1, workers)), self._make
        context = multiprocessing.get_context("fork")
        # Forked processes have the source; arguments would be copied.
        pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(self, release))
        return pool, _make_in_process

    def _receive(
        self,
        pool: Executor,
        futures: set[Future[Done]],
        bar: tqdm,
        before: int,
        finish: Callable[[Done], None],
    ) -> None:
        """Finishes shards, shows the progress, and stops at an error or at too many bad images."""
        try:
            while futures:
                ended, futures = wait(
                    futures, _SECONDS_BETWEEN_UPDATES, return_when=FIRST_COMPLETED
                )
                self._hear()
                bar.update(before + self._done.get_obj().value - bar.n)
                for future in ended:
                    finish(future.result())
                self._check_skipped()
        except BrokenProcessPool:
            raise UserError(
                f"{self._source.name}: a process that writes shards was killed, perhaps because "
                "memory was short: rerun the command to resume, or give fewer --threads"
            ) from None
        finally:
            # After an error or Ctrl-C, shards are not finished.
            self._stopped.value = 1
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                self._hear()  # a worker may wait until it is heard
                time.sleep(_SECONDS_BETWEEN_UPDATES / 10)
            pool.shutdown()

    def _hear(self) -> None:
        while not self._told.empty():
            self._skipped.append(self._told.get())

    def _make(self, task: Task) -> Done:
        """Writes one shard, in a worker."""
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
                if self._stopped.value:
                    raise CancelledError
                item = self._read(splits[number], index)
                try:
                    record, lacks_index = self._convert(item, converted, rows)
                    yield record
                    unindexed += lacks_index
                    counts[item.label] += 1
                except BadImageError as error:
                    skipped.append(self._skip(task.split, item, error))
                with self._done.get_lock():
                    self._done.value += 1

        try:
            written = records.write_records(path, examples())
            shard = Shard(task.file, written.examples, written.bytes, written.sha256)
            packed = metadata.pack(rows)
            return Done(
                task.split,
                shard,
                counts,
                dict(converted),
                skipped,
                task.digest,
                packed,
                unindexed,
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
        self._told.put(skipped)
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


def _can_fork() -> bool:
    """Whether a copy of this process works: locks that other threads hold would stay locked."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    from tensorflow.python.eager import context

    # Once it has run an operation, TensorFlow has threads.
    return not context.context()._initialized


# The writer of this worker process.
_writer: ShardWriter | None = None


def _begin(writer: ShardWriter, release: Callable[[], None]) -> None:
    """Begins a worker process."""
    global _writer
    _writer = writer
    end_with_parent()
    release()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it
    import tensorflow as tf

    # It writes JPEG indexes by an op of the CPU.
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _make_in_process(task: Task) -> Done:
    assert _writer is not None
    return _writer._make(task)
