"""Times interleaved training steps of a study's configurations, on an idle machine.

    python tools/studies/step_times.py bag_of_tricks --data_dir=data/fashion_mnist_32

writes benchmarks/STUDY/step_times.json, from which the study's --report calculates the seconds in
its page.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from study import runner, step_times

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_file

_BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
# Those with a function timed() that returns configurations by name.
STUDIES = ("bag_of_tricks", "equal_seconds")


def main(arguments: Sequence[str]) -> int:
    """Times the steps and writes the results."""
    parser = argparse.ArgumentParser("step_times", description=__doc__.split("\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data_dir", required=True, help="shards, as for the study")
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=0, help="as those of a run with --jobs (default: all cores)"
    )
    parser.add_argument(
        "--output_dir", type=pathlib.Path, help="(default: benchmarks/STUDY in this repository)"
    )
    given = parser.parse_args(arguments)
    if given.threads:
        runner.use_threads(given.threads)
    configs = importlib.import_module(f"{given.study}.experiments").timed()
    result = {
        **step_times.measure(configs, given.data_dir, given.repeats),
        "turns": given.repeats,
        "steps_in_a_turn": step_times.STEPS,
        "threads": given.threads or os.cpu_count(),
        **environment.provenance(),
    }
    directory = given.output_dir or _BENCHMARKS / given.study
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / step_times.FILE
    write_file(path, json.dumps(result, indent=2) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
