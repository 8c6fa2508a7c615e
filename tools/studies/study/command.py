"""The command line of a study."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from imagenet_fast.errors import UserError
from study import log, runner
from study.settings import SEEDS, Experiment

ROOT = pathlib.Path(__file__).parents[3]


def main(
    arguments: Sequence[str],
    *,
    name: str,
    description: str,
    experiments: Sequence[Experiment],
    training: str,
    report: Callable[[Mapping[log.Key, log.Record], pathlib.Path], None],
) -> int:
    """Trains what the log of a study lacks, and reports.

    Args:
      arguments: of the command line.
      name: of the study: its log is in ``benchmarks/NAME/runs.jsonl``.
      description: for ``--help``.
      experiments: all that there are.
      training: name of the module that trains a run; see ``runner.train``.
      report: writes what the records of the log tell, pictures into the log's folder.

    Returns:
      0, 2 after an error of the user's, or 130 after an interruption.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    parser = argparse.ArgumentParser(
        name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data_dir", help="shards; the page of the study says how to make them")
    parser.add_argument(
        "--only", choices=by_name, action="append", help="an experiment to train (default: all)"
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="of each setting (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    path = ROOT / "benchmarks" / name / "runs.jsonl"
    parser.add_argument(
        "--log", type=pathlib.Path, default=path, help=f"default: {path.relative_to(ROOT)}"
    )
    given = parser.parse_args(arguments)
    try:
        if min(given.seeds, given.jobs) < 1:
            raise UserError("seeds and jobs must be positive")
        if not given.report:
            if not given.data_dir:
                raise UserError("give --data_dir, or --report to train nothing")
            chosen = [by_name[only] for only in given.only or by_name]
            runs = runner.missing(chosen, given.seeds, given.log)
            runner.train(runs, training, given.data_dir, given.log, given.jobs)
        report(log.read(given.log), given.log.parent)
        return 0
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on", file=sys.stderr)
        return 130
