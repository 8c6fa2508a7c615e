"""A study of large batches on Fashion-MNIST, beside the papers' on ImageNet.

    python tools/studies/large_batch --data_dir=data/fashion_mnist --jobs=2

trains what the log lacks; when it was interrupted, the same command goes on. With --report, and
after the last run, it writes the tables and pictures of docs/large_batch.md from the log.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from imagenet_fast.errors import UserError
from large_batch import runner
from large_batch.experiments import EXPERIMENTS

_ROOT = pathlib.Path(__file__).parents[3]


def main(arguments: Sequence[str]) -> int:
    """Runs the study; returns 0, or 2 after an error of the user's."""
    experiments = {experiment.name: experiment for experiment in EXPERIMENTS}
    parser = argparse.ArgumentParser(
        "large_batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data_dir", help="Fashion-MNIST as shards, from `imagenet-fast prepare`")
    parser.add_argument(
        "--only", choices=experiments, action="append", help="an experiment; default: all"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each setting (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument(
        "--log",
        type=pathlib.Path,
        default=_ROOT / "benchmarks" / "large_batch" / "runs.jsonl",
        help="of the runs (default: benchmarks/large_batch/runs.jsonl)",
    )
    given = parser.parse_args(arguments)
    try:
        if min(given.seeds, given.jobs) < 1:
            raise UserError("seeds and jobs must be positive")
        if not given.report:
            if not given.data_dir:
                raise UserError("give --data_dir, or --report to train nothing")
            given.log.parent.mkdir(parents=True, exist_ok=True)
            chosen = [experiments[name] for name in given.only or experiments]
            runs = runner.missing(chosen, given.seeds, given.log)
            runner.train(runs, given.data_dir, given.log, given.jobs)
        return 0
    except UserError as error:
        print(f"large_batch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("large_batch: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
