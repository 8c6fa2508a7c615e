#!/usr/bin/env python3
"""Compares the crops of training images with those of torchvision's ``RandomResizedCrop``.

    tools/input_peers.sh .peers pytorch
    python tools/crop_distribution.py --pytorch=.peers/pytorch

draws crops of images of three sizes with ``--train_crop=random_resized`` and ``inception`` and with
torchvision; prints the quantiles of their areas and aspect ratios, and the Kolmogorov-Smirnov
distances from torchvision's; and writes ``crops.json`` and ``crops.svg``.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib.style
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from imagenet_fast import Config
from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import svg
from imagenet_fast.data.augmentation.crop_boxes import training_crop_boxes
from imagenet_fast.lab.benchmarks.report import STYLE

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Heights and widths: ImageNet's most common size, its portrait, and one that most crops do not fit.
SIZES = ((375, 500), (500, 375), (200, 800))
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
OURS, THEIRS = ("random_resized", "inception"), "torchvision"
# Times sqrt(2 / n): the distance that 1% of pairs of samples of the same distribution exceed.
_CRITICAL = 1.628
_BATCH = 20_000

# Reads the sizes and the number of crops, and writes heights and widths to a file.
_TORCHVISION = """
import json, sys
import numpy as np, torch, torchvision
from torchvision.transforms import RandomResizedCrop
sizes, count, path = json.loads(sys.argv[1])
torch.manual_seed(0)
crops = []
for height, width in sizes:
    image = torch.empty(3, height, width)
    draw = lambda: RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))[2:]
    crops.append([draw() for _ in range(count)])
np.save(path, np.array(crops))
print(torchvision.__version__)
"""

# Heights and widths, [sizes, crops, 2].
Crops = np.ndarray


def main(arguments: Sequence[str]) -> int:
    """Draws and compares crops; returns 0, or 2 after a user error."""
    parser = argparse.ArgumentParser(
        "crop_distribution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pytorch", type=pathlib.Path, required=True, help="virtual environment with torchvision"
    )
    parser.add_argument(
        "--crops", type=int, default=100_000, help="of each size (default: 100,000)"
    )
    parser.add_argument(
        "--output_dir",
        type=pathlib.Path,
        default=ROOT / "benchmarks" / "crops",
        help="for the results (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    try:
        found = {name: draw(name, given.crops) for name in OURS}
        found[THEIRS], version = draw_torchvision(given.pytorch, given.crops)
        rows = summary(found)
        print(table(rows))
        values = {"crops": given.crops, "torchvision": version, "sizes": rows}
        text = json.dumps({**values, **environment.provenance()}, indent=2) + "\n"
        for path in write_results(
            str(given.output_dir), {"crops.json": text, "crops.svg": picture(found)}
        ):
            print(path)
    except UserError as error:
        print(f"crop_distribution: error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(train_crop: str, count: int) -> Crops:
    """Draws crops of images of each size."""
    config = Config(train_crop=train_crop)
    places = np.arange(count)
    identities = np.stack([np.zeros(count), np.zeros(count), places], axis=1).astype(np.int64)
    crops = []
    for size in SIZES:
        parts = [
            training_crop_boxes(tf.constant([size] * len(batch)), tf.constant(batch), config)[:, 2:]
            for batch in np.array_split(identities, -(-count // _BATCH))
        ]
        crops.append(np.concatenate(parts))
    return np.stack(crops)


def draw_torchvision(folder: pathlib.Path, count: int) -> tuple[Crops, str]:
    """Draws crops with torchvision; returns them and torchvision's version.

    Raises:
      UserError: if the environment cannot be used.
    """
    program = str(folder / "bin" / "python")
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "crops.npy"
        request = json.dumps([SIZES, count, str(path)])
        try:
            done = subprocess.run(
                [program, "-c", _TORCHVISION, request], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise UserError(f"cannot run {program}: {error.strerror}") from None
        if done.returncode:
            raise UserError(f"torchvision of {folder} does not work: {done.stderr.strip()[-500:]}")
        return np.load(path), done.stdout.strip()


def areas(crops: Crops) -> np.ndarray:
    """Returns the crops' areas as fractions of the images', [sizes, crops]."""
    whole = np.array([height * width for height, width in SIZES])
    return crops.prod(axis=2) / whole[:, np.newaxis]


def aspects(crops: Crops) -> np.ndarray:
    """Returns the ratios of width to height, [sizes, crops]."""
    return crops[..., 1] / crops[..., 0]


def outside(crops: Crops) -> np.ndarray:
    """Returns the fraction of crops whose unrounded aspect ratio is outside [3/4, 4/3]."""
    height, width = crops[..., 0], crops[..., 1]
    low, high = (width + 0.5) / (height - 0.5), (width - 0.5) / (height + 0.5)
    return ((low < 3 / 4) | (high > 4 / 3)).mean(axis=1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the Kolmogorov-Smirnov distance of two samples."""
    values = np.sort(np.concatenate([one, other]))
    first, second = (
        np.searchsorted(np.sort(sample), values, side="right") / len(sample)
        for sample in (one, other)
    )
    return float(np.abs(first - second).max())


def summary(found: dict[str, Crops]) -> list[dict[str, Any]]:
    """Returns the table's rows, one for each size and kind of crop."""
    rows = []
    theirs = found[THEIRS]
    for place, size in enumerate(SIZES):
        for name, crops in found.items():
            rows.append(
                {
                    "size": list(size),
                    "crop": name,
                    "area": np.quantile(areas(crops)[place], QUANTILES).tolist(),
                    "aspect": np.quantile(aspects(crops)[place], QUANTILES).tolist(),
                    "outside": float(outside(crops)[place]),
                    "area_distance": distance(areas(crops)[place], areas(theirs)[place]),
                    "aspect_distance": distance(aspects(crops)[place], aspects(theirs)[place]),
                    "critical_distance": _CRITICAL * (2 / crops.shape[1]) ** 0.5,
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table, in Markdown."""
    quantiles = ", ".join(f"{100 * quantile:g}%" for quantile in QUANTILES)
    lines = [
        f"| size | crop | area, quantiles {quantiles} | aspect, the same | outside [3/4, 4/3] | "
        "distance of areas | of aspects |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        area, aspect = (
            ", ".join(f"{value:.3f}" for value in row[key]) for key in ("area", "aspect")
        )
        lines.append(
            f"| {'x'.join(map(str, row['size']))} | {row['crop']} | {area} | {aspect} | "
            f"{100 * row['outside']:.1f}% | {row['area_distance']:.4f} | "
            f"{row['aspect_distance']:.4f} |"
        )
    critical = rows[0]["critical_distance"]
    return "\n".join(
        [*lines, "", f"1% of samples of equal distributions differ by more than {critical:.4f}"]
    )


def picture(found: dict[str, Crops]) -> str:
    """Returns the histograms as an SVG file."""
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(8.4, 2.2 * len(SIZES)), layout="constrained")
        grid = figure.subplots(len(SIZES), 2)
        for place, size in enumerate(SIZES):
            for axes, label, values, bins in (
                (grid[place, 0], "area, fraction of the image", areas, np.linspace(0, 1, 51)),
                (grid[place, 1], "width / height", aspects, np.geomspace(0.7, 1.43, 51)),
            ):
                for name, crops in reversed(found.items()):
                    axes.hist(
                        values(crops)[place],
                        bins=bins,
                        density=True,
                        # torchvision's is filled; the others trace its edge if they are equal.
                        histtype="stepfilled" if name == THEIRS else "step",
                        alpha=0.35 if name == THEIRS else 1.0,
                        linewidth=1.2,
                        label=name,
                    )
                axes.set_xlabel(label if place == len(SIZES) - 1 else "")
                axes.set_yticks([])
                axes.set_title("x".join(map(str, size)), fontsize=9, loc="left")
        grid[0, 0].legend(frameon=False, fontsize=8)
        return svg(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
