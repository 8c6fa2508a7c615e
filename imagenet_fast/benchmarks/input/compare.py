"""How many images a second the input pipeline makes, where the time goes, and what others make."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import tensorflow as tf

from imagenet_fast.base.worker_process import Worker
from imagenet_fast.benchmarks.input.peers import PEERS, start_peers
from imagenet_fast.benchmarks.input.stages import make_bounds, make_stages
from imagenet_fast.benchmarks.input.variants import make_variant, names_of_variants
from imagenet_fast.benchmarks.timing import Comparison, Timed, take_turns
from imagenet_fast.config import Config
from imagenet_fast.data.memory import keep_freed_memory
from imagenet_fast.data.pipeline import make_dataset, thread_count

OWN = PEERS["own"]
# In this process: a buffer that holds all of a small data set would be filled, and so all be read,
# before the clock starts.
_MOST_SHUFFLED = 512


class InputBenchmark:
    """The parts of the benchmark. Each is a comparison whose first way is the one of interest.

    Args:
      config: of the data, the images, the batches and the threads. It runs on one device.
      environments: directories of virtual environments by the names of :data:`peers.PEERS`.
      images: in a sample, of which whole batches are taken.
      warmup: untimed samples of each way at first.
      repeats: timed samples of each way, in turns.
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
            shuffle_buffer=min(config.shuffle_buffer, _MOST_SHUFFLED)
        )
        self._environments = environments
        self._batches = max(images // config.batch_size, 1)
        self._turns = {"warmup": warmup, "repeats": repeats}

    def peers(self) -> Comparison:
        """Compares with other input pipelines, each in a process of its own.

        Raises:
          UserError: if an environment does not have what its pipeline needs.
        """
        wanted = {"own": "", "plain": "", **self._environments}
        wanted.pop("simplejpeg", None)
        with start_peers(self._config, wanted, self._images) as workers:
            ways = {PEERS[name]: self._asked(worker) for name, worker in workers.items()}
            notes = [
                f"{PEERS[name]}: {', '.join(' '.join(pair) for pair in worker.answer.items())}"
                for name, worker in workers.items()
            ]
            notes.append(
                f"Windows: train_crop={self._config.train_crop} here; as inception, which takes "
                "smaller ones than random_resized, in plain tf.data and Model Garden."
            )
            return self._compare("The same files, each in a process of its own", notes, ways)

    def bounds(self) -> Comparison:
        """Compares with what only decodes.

        Raises:
          UserError: if the environment of ``simplejpeg`` does not have it.
        """
        wanted = {
            name: directory
            for name, directory in self._environments.items()
            if name == "simplejpeg"
        }
        with start_peers(self._config, wanted, self._images) as workers:
            ways = {OWN: self._drained(make_dataset(self._steady, "train"))}
            for name, dataset in make_bounds(self._steady, self._batches).items():
                ways[name] = self._drained(dataset)
            for name, worker in workers.items():
                ways[PEERS[name]] = self._asked(worker)
            note = "The others read nothing, and leave their pixels as they are."
            return self._compare("Decoding alone", [note], ways)

    def stages(self) -> Comparison:
        """Times the pipeline up to each stage."""
        stages = make_stages(self._steady)
        ways = {name: self._drained(stage) for name, stage in stages.items()}
        return self._compare("The pipeline up to each stage", [], ways)

    def ablation(self) -> Comparison:
        """Times the pipeline with some of its optimizations, and with fewer threads."""
        ways = {
            name: self._drained(make_variant(self._steady, on))
            for name, on in names_of_variants().items()
        }
        everything = names_of_variants()["all"]
        count = 2
        while count < thread_count(self._steady):
            config = self._steady.replace(data_threads=count)
            ways[f"all, {count} threads"] = self._drained(make_variant(config, everything))
            count *= 2
        threads = thread_count(self._steady)
        note = f"Threads: {threads}. What takes the batches does nothing else."
        return self._compare("All optimizations, all but one, one alone", [note], ways)

    def cached(self) -> Comparison:
        """Compares decoded images in memory with images that are decoded each time."""
        crop = "pad" if self._steady.train_crop == "pad" else "none"
        ways = {
            f"cache={cache}": self._drained(
                make_dataset(self._steady.replace(cache=cache, train_crop=crop), "train")
            )
            for cache in ("decoded", "none")
        }
        return self._compare(f"Decoded images in memory, train_crop={crop}", [], ways)

    @property
    def _images(self) -> int:
        return self._batches * self._config.batch_size

    def _compare(self, title: str, notes: Iterable[str], ways: Mapping[str, Timed]) -> Comparison:
        times = take_turns(list(ways.values()), **self._turns)
        return Comparison(title, tuple(notes), tuple(ways), times, self._images)

    def _asked(self, worker: Worker) -> Timed:
        def sample() -> tuple[float, float]:
            seconds, cpu_seconds = worker.ask(str(self._batches))
            return seconds, cpu_seconds

        return sample

    def _drained(self, dataset: Iterable) -> Timed:
        """Returns what takes batches from a new iterator, of which nothing is left after."""
        # Until what was made ahead is used up, and threads are no longer in step.
        untimed = 2 * thread_count(self._config) + 4

        def sample() -> tuple[float, float]:
            batches = iter(dataset)
            for _ in range(untimed):
                next(batches)
            tf.test.experimental.sync_devices()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(self._batches):
                next(batches)
            tf.test.experimental.sync_devices()
            return time.perf_counter() - start, time.process_time() - cpu_start

        return sample
