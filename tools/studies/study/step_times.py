"""Interleaved timings of training steps, and their file in a study's folder."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from imagenet_fast.config import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.lab.benchmarks.timing import Spread, time_interleaved

if TYPE_CHECKING:
    from imagenet_fast.training.step.classifier import Classifier

FILE = "step_times.json"
# The clocks, as keys of the file.
WALL, CPU = "seconds_per_epoch", "cpu_seconds_per_epoch"
# More steps than a pipeline on the host makes batches at once.
STEPS = 12
_WARMUP = 1


def read(directory: pathlib.Path, clock: str = WALL) -> dict[str, float]:
    """Returns the median seconds of an epoch's steps by configuration; empty if there is no file.

    Args:
      directory: of the study's log.
      clock: ``WALL``, or ``CPU``, the processor time on all cores, which other programs hardly
        affect.
    """
    file = directory / FILE
    if not file.exists():
        return {}
    measured = json.loads(file.read_text(encoding="utf-8"))[clock]
    return {name: spread["median"] for name, spread in measured.items()}


def measure(
    configs: Mapping[str, Config], data_dir: str, repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the seconds of an epoch's steps by clock and configuration: median, min and max.

    Args:
      configs: by name, each with a single size of training images.
      data_dir: of the shards.
      repeats: timed turns of ``STEPS`` steps.

    Raises:
      UserError: if the data cannot be used.
    """
    import_tensorflow()
    from imagenet_fast.data.dataset import distributed_dataset
    from imagenet_fast.lab.benchmarks.step import on_new_iterators
    from imagenet_fast.training.build.model import build_model

    models = [build_model(config.replace(data_dir=data_dir)) for config in configs.values()]
    calls = [
        on_new_iterators(model, distributed_dataset(model.config, "train"), STEPS)
        for model in models
    ]
    times = time_interleaved(calls, warmup=_WARMUP, repeats=repeats)

    def spread(seconds: Sequence[float], model: Classifier) -> dict[str, float]:
        return dataclasses.asdict(Spread.of([s / STEPS * model.steps_per_epoch for s in seconds]))

    named = list(zip(configs, models, times))
    return {
        WALL: {name: spread(found.seconds, model) for name, model, found in named},
        CPU: {name: spread(found.cpu_seconds, model) for name, model, found in named},
    }
