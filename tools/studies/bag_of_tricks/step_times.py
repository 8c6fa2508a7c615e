"""Times interleaved training steps of the study's configurations, on an idle machine.

    python tools/studies/bag_of_tricks/step_times.py --data_dir=data/fashion_mnist_32

writes benchmarks/bag_of_tricks/step_times.json, from which the study's --report calculates the
seconds in docs/bag_of_tricks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from bag_of_tricks import experiments
from bag_of_tricks.report import STEP_TIMES
from imagenet_fast.base import environment
from imagenet_fast.base.files import write_file
from imagenet_fast.benchmarks.timing import Spread, time_interleaved
from imagenet_fast.distribute.quiet import import_tensorflow

_OUTPUT = pathlib.Path(__file__).parents[3] / "benchmarks" / "bag_of_tricks"
# More steps than the baseline's pipeline makes batches at once.
_STEPS, _WARMUP = 12, 1


def main(arguments: Sequence[str]) -> int:
    """Times the steps and writes the results."""
    parser = argparse.ArgumentParser("step_times", description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", required=True, help="shards, as for the study")
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--output_dir", type=pathlib.Path, default=_OUTPUT)
    given = parser.parse_args(arguments)
    result = {
        "seconds_per_epoch": _measure(given.data_dir, given.repeats),
        "turns": given.repeats,
        "steps_in_a_turn": _STEPS,
        **environment.provenance(),
    }
    path = given.output_dir / STEP_TIMES
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(result, indent=2) + "\n")
    print(path)
    return 0


def _measure(data_dir: str, repeats: int) -> dict[str, dict[str, float]]:
    """Returns the seconds per epoch of each configuration: median, min and max."""
    import_tensorflow()
    from imagenet_fast.benchmarks.step import on_new_iterators
    from imagenet_fast.data.pipeline import distributed_dataset
    from imagenet_fast.training.build import build_model

    configs = experiments.timed()
    models = [build_model(config.replace(data_dir=data_dir)) for config in configs.values()]
    calls = [
        on_new_iterators(model, distributed_dataset(model.config, "train"), _STEPS)
        for model in models
    ]
    times = time_interleaved(calls, warmup=_WARMUP, repeats=repeats)
    return {
        name: dataclasses.asdict(
            Spread.of([seconds / _STEPS * model.steps_per_epoch for seconds in found.seconds])
        )
        for name, model, found in zip(configs, models, times)
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
