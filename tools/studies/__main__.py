"""Trains the runs that are missing in a study's log, then writes its tables and plots.

    python tools/studies bag_of_tricks --data_dir=data/fashion_mnist_32 --seeds=5 --jobs=2
    python tools/studies equal_seconds --data_dir=data/fashion_mnist_32 --jobs=2
    python tools/studies large_batch --data_dir=data/fashion_mnist --jobs=2
    python tools/studies batch_norm_groups --data_dir=data/fashion_mnist --jobs=2

Rerun it to resume. --report trains nothing. Each study has a log in benchmarks/, beside its plots,
and its tables in a page of docs/. With another --log, plots and page are written beside that log,
and this repository's files do not change.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from study import log, page, runner
from study.settings import SEEDS, Experiment

from imagenet_fast.base.errors import UserError, nearest

ROOT = pathlib.Path(__file__).parents[2]
# The module of each study whose run(setting, seed, data_dir) trains.
STUDIES = {
    "bag_of_tricks": "study.training",
    "batch_norm_groups": "study.training",
    "equal_seconds": "study.training",
    "large_batch": "large_batch.training",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; errors end the process with status 2."""
    parser = argparse.ArgumentParser(
        "studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data_dir", help="shards; the study's page describes how to make them")
    parser.add_argument(
        "--only", metavar="EXPERIMENT", action="append", help="to train (default: all)"
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="of each setting (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous runs (default: 1)")
    parser.add_argument(
        "--runs_in_a_process", type=int, default=1, help="more for short runs (default: 1)"
    )
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument(
        "--log",
        type=pathlib.Path,
        help="log; plots and page are written beside it (default: benchmarks/STUDY/runs.jsonl in "
        "this repository, with the page in docs/)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Trains and reports; returns 0, 2 after a user error, 130 after an interruption."""
    given = parse(arguments)
    default = ROOT / "benchmarks" / given.study / "runs.jsonl"
    path = given.log or default
    pages = page.DOCS if path.resolve() == default.resolve() else path.parent
    try:
        if min(given.seeds, given.jobs, given.runs_in_a_process) < 1:
            raise UserError("seeds, jobs and runs_in_a_process must be positive")
        if not given.report:
            if not given.data_dir:
                raise UserError("give --data_dir, or --report to train nothing")
            runs = runner.missing(_experiments(given.study, given.only), given.seeds, path)
            module, together = STUDIES[given.study], given.runs_in_a_process
            if runs:
                runner.train(runs, module, given.data_dir, path, given.jobs, together)
            else:
                print(f"nothing to train: {path} contains all runs", file=sys.stderr)
        report = importlib.import_module(f"{given.study}.report")
        records = log.read(path)
        if not records:
            raise UserError(f"{path} contains no run: train some first, with --data_dir")
        report.write_report(records, path.parent, pages)
        return 0
    except UserError as error:
        print(f"{given.study}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{given.study}: interrupted; rerun the command to resume", file=sys.stderr)
        return 130


def _experiments(study: str, only: Sequence[str] | None) -> list[Experiment]:
    """Returns the experiments of a study, or only the named ones."""
    every = importlib.import_module(f"{study}.experiments").EXPERIMENTS
    by_name = {experiment.name: experiment for experiment in every}
    for name in only or ():
        if name not in by_name:
            raise UserError(f"{study} has no experiment {name!r}{nearest(name, list(by_name))}")
    return [by_name[name] for name in only or by_name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
