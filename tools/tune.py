#!/usr/bin/env python3
r"""Searches for the best values of a recipe's options by training with many of them.

    python tools/tune.py --flagfile=digits --data_dir=data/digits \
        --study_dir=runs/tune --trials=12 --fine_trials=8 \
        --search=learning_rate=log:0.01:1 --search=momentum=0.8:0.98 \
        --search='schedule=steps|cosine'

See docs/tuning.md. Needs Optuna: pip install -e '.[tune]'.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from tuning.plan import Plan, common_config, parse_space

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import option_names
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.quiet import import_tensorflow


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other user error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(arguments: Sequence[str]) -> Plan:
    """Parses the command line.

    Raises:
      SystemExit: after printing the help, if requested.
      UserError: if an argument is invalid.
    """
    parser = _Parser(
        prog="tune.py",
        description=__doc__,
        epilog="All other flags are those of `imagenet-fast train --helpfull`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--study_dir", required=True, help="directory of the search; one found there is resumed"
    )
    parser.add_argument(
        "--search",
        action="append",
        required=True,
        metavar="OPTION=VALUES",
        help="[log:][UNIT:]LOWEST:HIGHEST or VALUE|VALUE|...; once for each option",
    )
    parser.add_argument("--trials", type=int, default=20, help="runs (default: %(default)s)")
    parser.add_argument(
        "--fine_trials",
        type=int,
        default=0,
        help="further runs, in narrower ranges around the best of --trials (default: %(default)s)",
    )
    parser.add_argument(
        "--search_seed", type=int, default=0, help="of the values tried (default: %(default)s)"
    )
    given, rest = parser.parse_known_args(arguments)
    if given.trials < 1:
        raise UserError(f"trials is {given.trials}, but must be positive")
    if given.fine_trials < 0:
        raise UserError(f"fine_trials is {given.fine_trials}, but must not be negative")
    if given.search_seed < 0:
        raise UserError(f"search_seed is {given.search_seed}, but must not be negative")

    flags = CommandFlags("train", option_names())
    flags.parse(rest)
    space = parse_space(given.search)
    config = common_config(flags.changes(), space)
    if config.model_dir:
        raise UserError("leave out model_dir: each trial has its own under --study_dir")
    if config.stop_at_accuracy:
        raise UserError("stop_at_accuracy would stop different trials at the same error")
    return Plan(
        config=config,
        space=space,
        trials=given.trials,
        fine_trials=given.fine_trials,
        seed=given.search_seed,
        directory=pathlib.Path(given.study_dir),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the search of a command line; returns 0, or 2 after a user error."""
    try:
        plan = parse(arguments)
        if Cluster.from_environment():
            raise UserError(
                "the search trains in one process, but TF_CONFIG or Slurm names several workers"
            )
        try:
            import optuna  # noqa: F401
        except ImportError:
            raise UserError(f"the search needs Optuna: {how_to_install('tune')}") from None

        import_tensorflow()
        from tuning.results import table
        from tuning.search import search

        outcomes = search(plan)
        print(table(outcomes, plan.space))
        print(f"\n{plan.directory}: results.csv, study.svg, best.flags")
        return 0
    except UserError as error:
        print(f"tune.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tune.py: interrupted; rerun the command to resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
