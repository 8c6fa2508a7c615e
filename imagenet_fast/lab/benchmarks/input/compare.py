"""Benchmarks of the input pipeline: its speed, its stages' cost, and other pipelines' speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import Worker
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset, thread_count
from imagenet_fast.data.malloc import keep_freed_memory
from imagenet_fast.lab.benchmarks.input.peers import PEERS, start_peers
from imagenet_fast.lab.benchmarks.input.source import require_indexes
from imagenet_fast.lab.benchmarks.input.stages import make_bounds, make_stages
from imagenet_fast.lab.benchmarks.input.variants import VARIANTS, make_variant
from imagenet_fast.lab.benchmarks.timing import Comparison, TimedCall, time_interleaved, timed

_THIS = PEERS["own"]
# A shuffle buffer that holds all of a small data set would read all of it before timing starts.
_MAX_SHUFFLE_BUFFER = 512


class InputBenchmark:
    """The parts of the benchmark. Each method times one comparison.

    Args:
      config: of the data, the images, the batches and the threads. It runs on one device.
      environments: virtual environments of other pipelines, by their names in :data:`peers.PEERS`.
      images: in a sample, rounded down to whole batches.
      warmup: untimed samples of each variant at the start.
      repeats: timed samples of each variant, interleaved.
    """

    def __init__(
        self,
        config: Config,
        environments: Mapping[str, str],
        *,
        images: int,
        warmup: int,
        repeats: int,
    ) -> None:
        keep_freed_memory()  # For the bounds, too.
        self._config = config.replace(strategy="one_device")
        self._steady = self._config.replace(
            shuffle_buffer=min(config.shuffle_buffer, _MAX_SHUFFLE_BUFFER)
        )
        self._environments = environments
        self._batches = max(images // config.batch_size, 1)
        self._counts = {"warmup": warmup, "repeats": repeats}

    def peers(self) -> Comparison:
        """Compares with other input pipelines, each in its own process.

        Raises:
          UserError: if a package is missing in a pipeline's environment.
        """
        environments = {"own": "", "plain": "", **self._environments}
        with start_peers(self._config, environments, self._images) as workers:
            calls = {PEERS[name]: self._in_worker(worker) for name, worker in workers.items()}
            notes = [
                f"{PEERS[name]}: {', '.join(' '.join(pair) for pair in worker.answer.items())}"
                for name, worker in workers.items()
            ]
            notes.append(
                f"Crops: {_THIS} by train_crop={self._config.train_crop}; plain tf.data and Model "
                "Garden as inception, whose crops are smaller than those of random_resized."
            )
            return self._compare("The same files, each pipeline in its own process", notes, calls)

    def bounds(self) -> Comparison:
        """Compares with decoding alone."""
        calls = {_THIS: self._from_iterator(distributed_dataset(self._steady, "train"))}
        for name, dataset in make_bounds(self._steady, self._batches).items():
            calls[name] = self._from_iterator(dataset)
        note = (
            "The others have their files in memory. Crops made alone: as in training, without "
            "augmentation; the others of them are not resized either."
        )
        return self._compare("Decoding alone", [note], calls)

    def stages(self) -> Comparison:
        """Times the pipeline up to each stage."""
        stages = make_stages(self._steady)
        calls = {name: self._from_iterator(stage) for name, stage in stages.items()}
        return self._compare("The pipeline up to each stage", [], calls)

    def ablation(self) -> Comparison:
        """Times the pipeline with some of its optimizations, and with fewer threads."""
        calls = {
            name: self._from_iterator(make_variant(self._steady, enabled))
            for name, enabled in VARIANTS.items()
        }
        threads = thread_count(self._steady)
        count = 2
        while count < threads:
            config = self._steady.replace(data_threads=count)
            dataset = make_variant(config, VARIANTS["all"])
            calls[f"all, {count} threads"] = self._from_iterator(dataset)
            count *= 2
        note = f"Threads: {threads}. The batches' consumer does nothing else."
        return self._compare("All optimizations, all but one, one alone", [note], calls)

    def cached(self) -> Comparison:
        """Compares decoded images in memory with images that are decoded in each epoch."""
        crop = "pad" if self._steady.train_crop == "pad" else "none"
        calls = {
            f"cache={cache}": self._from_iterator(
                distributed_dataset(self._steady.replace(cache=cache, train_crop=crop), "train")
            )
            for cache in ("decoded", "none")
        }
        return self._compare(f"Decoded images in memory, train_crop={crop}", [], calls)

    def index(self) -> Comparison:
        """Compares training with and without JPEG indexes.

        Raises:
          UserError: if no image has an index, or indexes are not used.
        """
        calls = {
            name: self._from_iterator(distributed_dataset(options, "train"))
            for name, options in self._with_and_without_index("train")
        }
        return self._compare("Training, with and without JPEG indexes", [], calls)

    def evaluation(self) -> Comparison:
        """Compares evaluation with and without JPEG indexes, by passes over the validation data.

        Raises:
          UserError: as :meth:`index`; or if there is only one batch.
        """
        calls, images = {}, 0
        for name, options in self._with_and_without_index("validation"):
            dataset = distributed_dataset(options, "validation")
            images = (dataset.evaluation_steps - 1) * options.batch_size
            calls[name] = _reader(dataset, 1, dataset.evaluation_steps - 1)
        if not images:
            raise UserError(
                "to time evaluation, the validation data must have at least two batches: give a "
                "smaller --batch_size"
            )
        title = "Evaluation, with and without JPEG indexes"
        note = (
            "A sample is a pass over the validation data, padded to full batches, timed from the "
            "first batch on, because larger data needs the start once as well."
        )
        times = time_interleaved(list(calls.values()), **self._counts)
        return Comparison(title, (note,), tuple(calls), times, images)

    def _with_and_without_index(self, split: str) -> list[tuple[str, Config]]:
        require_indexes(self._steady, split, self._images)
        return [("with", self._steady), ("without", self._steady.replace(jpeg_index=False))]

    @property
    def _images(self) -> int:
        return self._batches * self._config.batch_size

    def _compare(
        self, title: str, notes: Iterable[str], calls: Mapping[str, TimedCall]
    ) -> Comparison:
        times = time_interleaved(list(calls.values()), **self._counts)
        return Comparison(title, tuple(notes), tuple(calls), times, self._images)

    def _in_worker(self, worker: Worker) -> TimedCall:
        return lambda: tuple(worker.ask(str(self._batches)))

    def _from_iterator(self, dataset: Iterable) -> TimedCall:
        # Until prefetched batches are used up, and the threads are no longer in step.
        untimed = 2 * thread_count(self._config) + 4
        return _reader(dataset, untimed, self._batches)


def _reader(dataset: Iterable, untimed: int, count: int) -> TimedCall:
    """Returns a timed call that reads batches from a new iterator, which it then drops.

    The first ``untimed`` ones are read before.
    """

    def sample() -> tuple[float, float]:
        batches = iter(dataset)

        def read(number: int) -> None:
            for _ in range(number):
                next(batches)
            tf.test.experimental.sync_devices()

        read(untimed)
        return timed(lambda: read(count))()

    return sample
