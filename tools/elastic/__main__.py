"""Compares runs of the same logical replicas that different devices have carried.

    python tools/elastic --data_dir=data/digits --output_dir=benchmarks/elastic
    python tools/elastic --recipe --data_dir=data/fashion_mnist --output_dir=benchmarks/elastic

Trains small networks for 50 steps of 8 logical replicas: on 8 devices, and on 1, 2 and 4; by 2 and
4 worker processes; and by 1 device, 4 devices, 2 workers and 1 device in turn. Devices are parts of
this machine's CPU. The weights are compared with those of 8 devices; so are those of 8 devices with
a learning rate that differs in its seventh digit, which tells what rounding alone becomes. --recipe
trains 20 steps of facebook_1h_8k with an eighth of the channels, on images of 28 pixels: 256
replicas on 8 devices, 2 and one, and on 8 with that other learning rate.

Writes elastic.json (or recipe.json) and a table beside it. Rerun it to train what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from imagenet_fast.base.environment import provenance
from imagenet_fast.base.files import write_file

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
STEPS = 50
REFERENCE = "8 devices"
OTHER_RATE = "8 devices, another learning rate"


class Part(NamedTuple):
    """A part of a run: the devices of one process, or several worker processes, and its end."""

    devices: int = 1
    workers: int = 0
    until: int = STEPS


# Where each run goes.
RUNS = {
    REFERENCE: [Part(8)],
    "4 devices": [Part(4)],
    "2 devices": [Part(2)],
    "1 device": [Part(1)],
    "2 workers": [Part(workers=2)],
    "4 workers": [Part(workers=4)],
    "1, then 4 devices, 2 workers, 1": [
        Part(1, until=10),
        Part(4, until=25),
        Part(1, 2, 40),
        Part(1),
    ],
    OTHER_RATE: [Part(8)],
}
# Options of each network; the last one's learning rate is multiplied in the last run.
NETWORKS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({"mixup_alpha": 0.2, "batch_size": 64}, 0.003),
    "small_resnet": ({"mixup_alpha": 0.2, "batch_size": 64}, 0.0003),
}
RECIPE_RUNS = {
    "8 devices": [Part(8, until=20)],
    "2 devices": [Part(2, until=20)],
    "1 device": [Part(1, until=20)],
    OTHER_RATE: [Part(8, until=20)],
}


def main() -> None:
    """Trains, compares, and writes the results."""
    parser = argparse.ArgumentParser(
        "elastic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True, help="shards of digits, or Fashion-MNIST")
    parser.add_argument("--output_dir", required=True, help="for the results")
    parser.add_argument("--run_dir", default="runs/elastic", help="for the runs")
    parser.add_argument("--recipe", action="store_true", help="train facebook_1h_8k")
    given = parser.parse_args()
    name = "recipe" if given.recipe else "elastic"
    jobs = []
    if given.recipe:
        jobs = [("facebook_1h_8k", run, parts) for run, parts in RECIPE_RUNS.items()]
    else:
        jobs = [(network, run, parts) for network in NETWORKS for run, parts in RUNS.items()]
    folders = {}
    for network, run, parts in tqdm(jobs, unit=" runs"):
        folder = pathlib.Path(given.run_dir, network, run.replace(" ", "_").replace(",", ""))
        train(folder, network, run, parts, str(pathlib.Path(given.data_dir).resolve()))
        folders[network, run] = folder
    results = []
    for (network, run), folder in folders.items():
        reference = next(path for (other, _), path in folders.items() if other == network)
        if folder != reference:
            results.append({"network": network, "run": run, **compared(folder, reference)})
    output = pathlib.Path(given.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    content = {"results": results, **{k: v for k, v in provenance().items() if k != "command"}}
    write_file(output / f"{name}.json", json.dumps(content, indent=1) + "\n")
    write_file(output / f"{name}.txt", table(results))
    print(table(results), end="")


def train(folder: pathlib.Path, network: str, run: str, parts: list[Part], data: str) -> None:
    """Trains a run part by part, unless it is there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for devices, workers, until in parts:
        command = ["-m", "imagenet_fast"]
        if workers:
            command = [str(ROOT / "tools" / "launch_local.py"), f"--workers={workers}", "--"]
        command += ["train", *options_of(network, run), f"--data_dir={data}"]
        command += [f"--model_dir={folder.absolute() / 'run'}", f"--duration={until} steps"]
        command += [f"--logical_cpus={devices}"] * (devices > 1)
        with (folder / "log.txt").open("ab") as log:
            subprocess.run(
                [sys.executable, *command],
                check=True,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}", "TF_CPP_MIN_LOG_LEVEL": "2"},
            )
    (folder / "done").touch()


def options_of(network: str, run: str) -> list[str]:
    """Returns a run's flags."""
    factor = 1 + 1e-6 * (run == OTHER_RATE)
    if network == "facebook_1h_8k":
        return [
            *("--flagfile=facebook_1h_8k", "--model=elastic_networks:narrow_resnet"),
            *("--image_size=28", "--train_crop=pad", "--noexamine", "--log_every=1 steps"),
            *("--checkpoint_every=20 steps", "--eval_every=20 steps"),
            # The rate with which its warmup of 780 steps begins.
            *("--warmup=0 steps", "--rate_scaling=none", f"--learning_rate={0.1 * factor!r}"),
            "--decay_at=",
        ]
    options, rate = NETWORKS[network]
    return [
        *("--flagfile=digits", "--replicas=8,1", f"--model=elastic_networks:{network}"),
        *(f"--learning_rate={rate * factor!r}", "--warmup=0 steps", "--decay_at=", "--noexamine"),
        *("--log_every=1 steps", "--checkpoint_every=10 steps", "--eval_every=50 steps"),
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def compared(folder: pathlib.Path, reference: pathlib.Path) -> dict[str, Any]:
    """Returns the differences between two runs.

    Returns:
      ``weights``: the largest relative difference, of norms, of a weight; ``median`` of all;
      ``loss``: the largest relative difference of a step's training loss, in all and in the first
      three steps; ``counters_differ``: whether integers, as those of random draws, differ.
    """
    arrays, others = weights_of(folder), weights_of(reference)
    relative = [
        float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-12))
        for one, other in zip(arrays, others)
        if one.dtype.kind == "f"
    ]
    integers = [np.any(a != b) for a, b in zip(arrays, others) if a.dtype.kind != "f"]
    losses = np.array([losses_of(path) for path in (folder, reference)])
    apart = np.abs(losses[0] / losses[1] - 1)
    return {
        "weights": max(relative),
        "median": float(np.median(relative)),
        "loss": float(apart.max()),
        "loss_of_3_steps": float(apart[:3].max()),
        "counters_differ": bool(any(integers)),
    }


def weights_of(folder: pathlib.Path) -> list[np.ndarray]:
    """Returns the weights and random states in a run's last checkpoint."""
    path = tf.train.latest_checkpoint(str(folder / "run" / "checkpoints"))
    reader = tf.train.load_checkpoint(path)
    names = reader.get_variable_to_shape_map()
    kept = sorted(name for name in names if name.startswith(("weights/", "random/")))
    return [reader.get_tensor(name) for name in kept]


def losses_of(folder: pathlib.Path) -> list[float]:
    """Returns the training loss of each step."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results as text."""
    head = ("network", "carried by", "weights: worst", "median", "loss: worst", "first 3 steps")
    lines = [head]
    for one in results:
        numbers = (one[key] for key in ("weights", "median", "loss", "loss_of_3_steps"))
        lines.append((one["network"], one["run"], *(f"{number:.1e}" for number in numbers)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() + "\n"
        for line in lines
    )


if __name__ == "__main__":
    main()
