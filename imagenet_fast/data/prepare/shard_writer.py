"""Shards that processes of this machine make in parallel."""

from __future__ import annotations

import abc
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
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

from tqdm import tqdm

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.data.manifest import Skipped
from imagenet_fast.data.prepare.image_limit import ImageLimit
from imagenet_fast.data.prepare.journal import Done
from imagenet_fast.data.prepare.plan import Task
from imagenet_fast.data.prepare.shard_maker import ShardMaker

_BAD_IMAGES_SHOWN = 5
_SECONDS_BETWEEN_UPDATES = 0.2  # of the progress bar


Finish = Callable[[Done], None]
Release = Callable[[], None]


class Writer(abc.ABC):
    """What writes shards.

    Args:
      maker: makes each of them.
      bad_limit: how many images may be skipped.
      progress: whether to show a progress bar.
    """

    def __init__(self, maker: ShardMaker, bad_limit: ImageLimit, progress: bool) -> None:
        self.maker = maker
        self._bad_limit = bad_limit
        self._progress = progress

    @abc.abstractmethod
    def run(self, tasks: list[Task], done: list[Done], finish: Finish, release: Release) -> None:
        """Writes the shards of ``tasks``.

        Args:
          tasks: the shards to write.
          done: shards of earlier runs, for the progress bar and the limit on bad images.
          finish: called with each shard once it has its final name; calls do not overlap.
          release: called in each forked process, to close what only this one may hold.

        Raises:
          UserError: as ``prepare``, or a worker process was killed.
        """

    def check_skipped(self, skipped: list[Skipped]) -> None:
        """Checks the number of images that could not be used so far.

        Raises:
          UserError: they are more than the limit.
        """
        total = sum(self.maker.source.splits.values())
        most = self._bad_limit.images(total)
        if len(skipped) <= most:
            return
        examples = "; ".join(f"{one.file}: {one.reason}" for one in skipped[:_BAD_IMAGES_SHOWN])
        of = "" if self._bad_limit.count is not None else f"={self._bad_limit} of {total}"
        raise UserError(
            f"{self.maker.source.name}: more than {counted(most, 'image')} (max_bad_images{of}) "
            f"cannot be used, such as {examples}"
        )

    def progress_bar(self, tasks: list[Task], done: list[Done]) -> tqdm:
        """Returns a bar of all images, of which earlier runs did those in ``done``."""
        before = sum(shard.images for shard in done)
        return tqdm(
            desc=self.maker.source.name,
            total=before + sum(len(task.places) for task in tasks),
            initial=before,
            unit=" images",
            disable=not self._progress,
        )


class ShardWriter(Writer):
    """Writes shards in parallel processes, or in threads where a process cannot be forked safely.

    Threads share Python's lock: only reading and codecs release it, so of small images they make
    hardly more than one core does.
    """

    def __init__(
        self, maker: ShardMaker, workers: int, bad_limit: ImageLimit, progress: bool
    ) -> None:
        super().__init__(maker, bad_limit, progress)
        self._workers = workers
        self._skipped: list[Skipped] = []
        # What workers tell: the number of images done, and those that they skip. One that is killed
        # may leave a lock locked: this process uses none.
        context = multiprocessing.get_context("fork")
        self._done = context.Value("q", 0)
        self._told = context.SimpleQueue()
        self._stopped = context.RawValue("b", 0)
        # Held by the worker whose image takes much memory.
        self._one_at_a_time = context.RLock()

    def run(self, tasks: list[Task], done: list[Done], finish: Finish, release: Release) -> None:
        """As ``Writer``."""
        self._skipped += [skipped for shard in done for skipped in shard.skipped]
        self.check_skipped(self._skipped)
        import tensorflow  # noqa: F401  (takes seconds, which the progress bar should not count)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # about metadata that is not used
            pool, make = self._pool(min(self._workers, len(tasks)), release)
            # Before the bar, whose thread a fork would not have.
            futures = {pool.submit(make, task) for task in tasks}
            with self.progress_bar(tasks, done) as bar:
                self._receive(pool, futures, bar, finish)

    def _pool(self, workers: int, release: Release) -> tuple[Executor, Callable[[Task], Done]]:
        """Returns workers, and the function that one of them writes a shard by."""
        if workers < 2 or self.maker.source.in_bucket or not _can_fork():
            return ThreadPoolExecutor(max(1, workers)), self._make
        context = multiprocessing.get_context("fork")
        # Forked processes have the source; arguments would be copied.
        pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(self, release))
        return pool, _make_in_process

    def _receive(
        self, pool: Executor, futures: set[Future[Done]], bar: tqdm, finish: Finish
    ) -> None:
        """Finishes shards, shows the progress, and stops at an error or at too many bad images."""
        before = bar.n
        try:
            while futures:
                ended, futures = wait(
                    futures, _SECONDS_BETWEEN_UPDATES, return_when=FIRST_COMPLETED
                )
                self._hear()
                bar.update(before + self._done.get_obj().value - bar.n)
                for future in ended:
                    finish(future.result())
                self.check_skipped(self._skipped)
        except BrokenProcessPool:
            raise UserError(
                f"{self.maker.source.name}: a process that writes shards was killed, perhaps "
                "because memory was short: rerun the command to resume, or give fewer --threads"
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

        def tell(skipped: Skipped | None) -> None:
            if skipped:
                self._told.put(skipped)
            with self._done.get_lock():
                self._done.value += 1
            if self._stopped.value:
                raise CancelledError

        return self.maker.make(task, tell, self._one_at_a_time)


def _can_fork() -> bool:
    """Whether a copy of this process works: locks that other threads hold would stay locked."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    from tensorflow.python.eager import context

    # Once it has run an operation, TensorFlow has threads.
    return not context.context()._initialized


# The writer of this worker process.
_writer: ShardWriter | None = None


def _begin(writer: ShardWriter, release: Release) -> None:
    """Begins a worker process."""
    global _writer
    _writer = writer
    end_with_parent()
    release()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it
    use_one_core()


def use_one_core() -> None:
    """Makes TensorFlow leave the other cores, and GPUs, to others; before it is used."""
    import tensorflow as tf

    # It writes JPEG indexes by an op of the CPU.
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _make_in_process(task: Task) -> Done:
    assert _writer is not None
    return _writer._make(task)
