"""Trains the runs that are missing in the log, in processes of one or a few runs."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from imagenet_fast.distribute.quiet import import_tensorflow
from study import log
from study.settings import Experiment, Setting

Run = tuple[Setting, int]


def missing(experiments: Sequence[Experiment], seeds: int, path: pathlib.Path) -> list[Run]:
    """Returns the runs that are not in the log, all settings of one seed before the next seed."""
    done = set(log.read(path))
    runs = []
    for seed in range(seeds):
        for experiment in experiments:
            for setting in experiment.settings:
                if log.key(setting, seed) not in done:
                    done.add(log.key(setting, seed))
                    runs.append((setting, seed))
    return runs


def train(
    runs: Sequence[Run],
    module: str,
    data_dir: str,
    path: pathlib.Path,
    jobs: int,
    runs_in_a_process: int = 1,
) -> None:
    """Trains ``runs`` and appends each to the log when it is complete.

    Args:
      runs: to train.
      module: name of the study's module whose ``run(setting, seed, data_dir)`` trains. Only the
        processes that train import TensorFlow.
      data_dir: of the shards.
      path: of the log.
      jobs: simultaneous runs.
      runs_in_a_process: after which a new process begins, because TensorFlow does not free all
        memory of a run. More save time for starting processes and reading data.

    Raises:
      UserError: if the data cannot be used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # Each thread waits for a process.
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    lock = threading.Lock()
    try:
        with tqdm(total=len(runs), unit="run", dynamic_ncols=True, file=sys.stderr) as bar:

            def train_some(some: Sequence[Run]) -> None:
                for (setting, seed), result in _in_a_process(threads, module, some, data_dir):
                    with lock:
                        log.append(path, setting, seed, result)
                        name = f"{setting.method}, batch {setting.batch}, seed {seed}"
                        bar.write(f"{name}: {_text(result)}")
                        bar.update()

            begins = range(0, len(runs), runs_in_a_process)
            parts = [runs[begin : begin + runs_in_a_process] for begin in begins]
            futures = [pool.submit(train_some, part) for part in parts]
            for future in concurrent.futures.as_completed(futures):
                future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _text(result: dict[str, Any]) -> str:
    if result["error"] is None:
        return "diverged"
    return f"{result['error']:.2%} error, {result['seconds']:.0f} s"


def _in_a_process(
    threads: int, module: str, runs: Sequence[Run], data_dir: str
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yields the results of :func:`_run` in a new process, one run after the other."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, use_threads, (threads,)) as pool:
        for run in runs:
            yield run, pool.submit(_run, module, *run, data_dir).result()


def use_threads(threads: int) -> None:
    """Makes TensorFlow compute with as many threads, in a process that has not used it yet."""
    import_tensorflow()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _run(module: str, setting: Setting, seed: int, data_dir: str) -> dict[str, Any]:
    return importlib.import_module(module).run(setting, seed, data_dir)
