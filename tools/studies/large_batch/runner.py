"""Trains what the log lacks, several runs at a time, each in a process of its own cores."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from large_batch import log
from large_batch.experiments import Experiment, Setting

Run = tuple[Setting, int]


def missing(experiments: Sequence[Experiment], seeds: int, path: pathlib.Path) -> list[Run]:
    """Returns the runs that the log lacks, all settings with the first seed before the second."""
    done = set(log.read(path))
    runs = []
    for seed in range(seeds):
        for experiment in experiments:
            for setting in experiment.settings:
                if log.key(setting, seed) not in done:
                    done.add(log.key(setting, seed))
                    runs.append((setting, seed))
    return runs


def train(runs: Sequence[Run], data_dir: str, path: pathlib.Path, jobs: int) -> None:
    """Trains ``runs`` and adds each to the log when it has ended.

    Args:
      runs: what to train.
      data_dir: of the shards.
      path: of the log.
      jobs: runs at a time.

    Raises:
      UserError: if the data cannot be used.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _begin, (threads,)
    )
    try:
        futures = {pool.submit(_train, *run, data_dir): run for run in runs}
        with tqdm(total=len(runs), unit="run", dynamic_ncols=True, file=sys.stderr) as bar:
            for future in concurrent.futures.as_completed(futures):
                setting, seed = futures[future]
                result = future.result()
                log.append(path, setting, seed, result)
                bar.write(f"{setting.method}, batch {setting.batch}, seed {seed}: {_told(result)}")
                bar.update()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _told(result: dict[str, Any]) -> str:
    if result["error"] is None:
        return "diverged"
    return f"{result['error']:.2%} error, {result['seconds']:.0f} s"


def _begin(threads: int) -> None:
    # TensorFlow is imported in the processes that train only.
    from large_batch.training import use_threads

    use_threads(threads)


def _train(setting: Setting, seed: int, data_dir: str) -> dict[str, Any]:
    from large_batch.training import run

    return run(setting, seed, data_dir)
