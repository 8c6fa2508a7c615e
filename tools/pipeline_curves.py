#!/usr/bin/env python3
"""Trains networks with and without pipelines, and compares their losses.

    python tools/pipeline_curves.py --data_dir=data/fashion_mnist

trains each network without a pipeline, in two and four stages, and in two stages until it is killed
in mid-run and resumes in four. The losses should be the same, except for rounding errors that
accumulate over hundreds of steps; training without a pipeline but with other kernels shows their
size. Prints a table, and writes ``curves.json`` and ``curves.svg``. Rerun it to resume.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib.style
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import svg
from imagenet_fast.lab.benchmarks.report import STYLE
from imagenet_fast.training.logs.metrics_file import read_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The options of each network.
NETWORKS = {
    "AmoebaNet-D (3, 32)": ["--model=amoebanet_d", "--normal_cells=3", "--cell_filters=32"],
    "ResNet-8": ["--model=resnet8"],
}
_MICRO_BATCHES = 4
_OPTIONS = [
    "--image_size=28",
    "--batch_size=256",
    f"--accumulation_steps={_MICRO_BATCHES}",
    "--learning_rate=0.1",
    "--rate_scaling=none",
    "--warmup=0.5 epochs",
    "--checkpoint_every=50 steps",
    "--eval_every=1 epochs",
    "--noexamine",
    "--notensorboard",
]
_POLL_SECONDS = 0.2


class Variant(NamedTuple):
    """A way to train a network.

    Attributes:
      name: in the table.
      stages: of the pipeline; 1: no pipeline.
      then: stages with which the run resumes after it was killed; 0: it is not killed.
      environment: environment variables.
    """

    name: str
    stages: int
    then: int = 0
    environment: Mapping[str, str] = MappingProxyType({})


VARIANTS = (
    Variant("no pipeline", 1),
    Variant("no pipeline, without oneDNN", 1, environment={"TF_ENABLE_ONEDNN_OPTS": "0"}),
    Variant("2 stages", 2),
    Variant("4 stages", 4),
    Variant("2 stages, killed, 4 stages", 2, then=4),
)


class Curve(NamedTuple):
    """The metrics of a run.

    Attributes:
      losses: training losses by step.
      accuracies: top-1 validation accuracies by step.
    """

    losses: dict[int, float]
    accuracies: dict[int, float]

    @classmethod
    def read(cls, model_dir: pathlib.Path) -> Curve:
        """Reads the metrics that ``train`` wrote."""
        rows = read_rows(str(model_dir))
        by_kind = [{row["step"]: row for row in rows if row["kind"] == kind} for kind in _KINDS]
        train, validation = by_kind
        return cls(
            {step: row["loss"] for step, row in train.items()},
            {step: row["top1"] for step, row in validation.items()},
        )

    def difference(self, other: Curve) -> float:
        """Returns the largest relative difference of the losses.

        Raises:
          UserError: if their steps differ.
        """
        if self.losses.keys() != other.losses.keys():
            raise UserError("the runs have different steps: remove --runs_dir and start again")
        return max(abs(loss / other.losses[step] - 1) for step, loss in self.losses.items())


_KINDS = ("train", "validation")


def main(arguments: Sequence[str]) -> int:
    """Trains and compares; returns 0, or 2 after a user error."""
    parser = argparse.ArgumentParser(
        "pipeline_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data_dir", required=True, help="shards written by `prepare`")
    parser.add_argument(
        "--runs_dir",
        type=pathlib.Path,
        default=ROOT / "runs" / "pipeline_curves",
        help="for the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--output_dir",
        type=pathlib.Path,
        default=ROOT / "benchmarks" / "pipeline",
        help="for the results (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=3, help="of each run (default: 3)")
    given = parser.parse_args(arguments)
    try:
        curves = {
            network: {
                variant.name: _trained(given, network, variant, options) for variant in VARIANTS
            }
            for network, options in NETWORKS.items()
        }
        print(table(curves))
        for path in write_results(str(given.output_dir), files(curves, given.epochs)):
            print(path)
    except UserError as error:
        print(f"pipeline_curves: error: {error}", file=sys.stderr)
        return 2
    return 0


def _trained(
    given: argparse.Namespace, network: str, variant: Variant, options: Sequence[str]
) -> Curve:
    """Trains unless that was done before, and returns the curve."""
    model_dir = given.runs_dir / f"{network} {variant.name}".translate(
        str.maketrans(" ,()", "____")
    )
    command = [sys.executable, "-m", "imagenet_fast", "train", *options, *_OPTIONS]
    command += [f"--data_dir={given.data_dir}", f"--model_dir={model_dir}"]
    # Otherwise logical CPUs without a stage would each be a replica.
    command += [f"--duration={given.epochs} epochs", "--strategy=one_device"]
    command += [f"--logical_cpus={max(variant.stages for variant in VARIANTS)}"]
    print(f"{network}, {variant.name}", file=sys.stderr, flush=True)
    last = variant.stages
    if variant.then:
        last = variant.then
        run_until(
            [*command, f"--pipeline_stages={variant.stages}"],
            lambda: _epochs(model_dir) > given.epochs / 2,
            variant.environment,
        )
    run_until([*command, f"--pipeline_stages={last}"], lambda: False, variant.environment)
    return Curve.read(model_dir)


def _epochs(model_dir: pathlib.Path) -> float:
    return max((row["epoch"] for row in read_rows(str(model_dir))), default=0.0)


def run_until(
    command: Sequence[str],
    killed: Callable[[], bool],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs a command until it ends, or kills it as soon as ``killed()`` returns True.

    Args:
      command: the program and its arguments.
      killed: polled while the command runs.
      environment: variables in addition to this process'.

    Raises:
      UserError: if it fails.
    """
    if killed():
        return  # by an earlier call
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        while process.poll() is None:
            if killed():
                process.send_signal(signal.SIGKILL)
                process.wait()
                return
            time.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise UserError(f"`{' '.join(command)}` failed with status {process.returncode}")


Curves = dict[str, dict[str, Curve]]


def table(curves: Curves) -> str:
    """Returns the table, in Markdown.

    Args:
      curves: by network and variant; the others are compared with the first variant.
    """
    lines = [
        "| | losses differ by at most | top-1, after each epoch |",
        "| --- | --- | --- |",
    ]
    for network, variants in curves.items():
        first = next(iter(variants.values()))
        for name, curve in variants.items():
            difference = "" if curve is first else f"{curve.difference(first):.1e}"
            accuracies = ", ".join(f"{100 * value:.2f}%" for value in curve.accuracies.values())
            lines.append(f"| {network}, {name} | {difference} | {accuracies} |")
    return "\n".join(lines)


def files(curves: Curves, epochs: int) -> dict[str, str]:
    """Returns the contents of the files by name."""
    values = {
        "curves": {
            network: {name: curve._asdict() for name, curve in variants.items()}
            for network, variants in curves.items()
        },
        "options": [*_OPTIONS, f"--duration={epochs} epochs"],
        "networks": NETWORKS,
        **environment.provenance(),
    }
    return {"curves.json": json.dumps(values, indent=2) + "\n", "curves.svg": _picture(curves)}


def _picture(curves: Curves) -> str:
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(4.6 * len(curves), 3.6), layout="constrained")
        for place, (network, variants) in enumerate(curves.items()):
            axes = figure.add_subplot(1, len(curves), place + 1)
            for width, (name, curve) in zip((9, 7, 5, 3, 1), variants.items()):
                # Later curves are narrower, so that equal ones are visible inside each other.
                axes.plot(
                    list(curve.losses), list(curve.losses.values()), linewidth=width, label=name
                )
            axes.set_title(network, fontsize=9, loc="left")
            axes.set_xlabel("step")
            axes.set_ylabel("training loss")
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=7)
        return svg(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
