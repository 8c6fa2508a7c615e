"""The serving benchmark as a table, a JSON file and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import PLOT_STYLE, svg
from imagenet_fast.benchmarks.serving.compare import Served

_PERCENTILES = (50, 95, 99)


def table(parts: Sequence[Served]) -> str:
    """Returns what was measured as text, with the hardware that it was measured on."""
    lines = []
    for part in parts:
        lines += [*_part_lines(part), ""]
    hardware = environment.hardware()
    versions = ", ".join(f"{name} {version}" for name, version in parts[0].versions.items())
    first = parts[0]
    return "\n".join(
        [
            *lines,
            f"images/s: medians of {first.comparison.repeats} turns; ms: of all "
            f"{len(first.latencies[0])} calls",
            "memory: MB of a process that serves nothing else, with its runtime and at most",
            f"on {hardware['cpu']}, {hardware['cores']} cores; {versions}",
        ]
    )


def write(parts: Sequence[Served], options: dict[str, Any], directory: str) -> list[str]:
    """Writes ``serving.txt``, ``serving.json`` and ``serving.svg``; returns their paths.

    Args:
      parts: what was measured.
      options: the benchmark's flags and their values.
      directory: where to write; made if it does not exist.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {
        "serving.txt": table(parts) + "\n",
        "serving.json": _to_json(parts, options),
        "serving.svg": _picture(parts),
    }
    return write_results(directory, texts)


def _part_lines(part: Served) -> list[str]:
    names = part.comparison.names
    width = max(map(len, names))
    lines = [
        part.comparison.title,
        f"{'':{width}}  {'images/s':>9} {'min':>8} {'max':>8}  {'ms: median':>10} {'p95':>8} "
        f"{'p99':>8}  {'memory':>6} {'peak':>6}  top-5 as evaluation's",
    ]
    for index, name in enumerate(names):
        speed = part.comparison.images_per_second(index)
        median, *tails = _milliseconds(part, index)
        agreement = part.agreements[index]
        lines.append(
            f"{name:{width}}  {speed.median:>9,.1f} {speed.min:>8,.1f} {speed.max:>8,.1f}  "
            f"{median:>10.2f} {tails[0]:>8.2f} {tails[1]:>8.2f}  "
            f"{_megabytes(part.memory[index]):>6} {_megabytes(part.peak_memory[index]):>6}  "
            f"{agreement.same} of {agreement.images}; probabilities to {agreement.difference:.0e}"
        )
    return lines


def _milliseconds(part: Served, index: int) -> list[float]:
    """Returns the percentiles of a way's latencies."""
    return np.percentile(1e3 * np.array(part.latencies[index]), _PERCENTILES).tolist()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count else "?"


def _to_json(parts: Sequence[Served], options: dict[str, Any]) -> str:
    values = {
        "n": parts[0].comparison.repeats,
        "parts": {f"batch {part.batch_size}": _part_values(part) for part in parts},
        "options": options,
        **environment.provenance(),
        "versions": {**environment.versions(), **parts[0].versions},
    }
    return json.dumps(values, indent=2) + "\n"


def _part_values(part: Served) -> dict[str, Any]:
    ways = {
        name: {
            "images_per_second": vars(part.comparison.images_per_second(index)),
            "latency_ms": dict(zip(("median", "p95", "p99"), _milliseconds(part, index))),
            "memory_bytes": part.memory[index],
            "peak_memory_bytes": part.peak_memory[index],
            "agreement": dataclasses.asdict(part.agreements[index]),
            "each_call_seconds": [round(seconds, 6) for seconds in part.latencies[index]],
            "each_turn_cpu_seconds": [
                round(seconds, 6) for seconds in part.comparison.times[index].cpu_seconds
            ],
        }
        for index, name in enumerate(part.comparison.names)
    }
    return {"title": part.comparison.title, "images": part.comparison.images, "ways": ways}


def _picture(parts: Sequence[Served]) -> str:
    """Draws speeds, latencies and memory of each way, a row for each batch size; returns SVG."""
    with matplotlib.style.context([*PLOT_STYLE, {"axes.grid.axis": "x"}]):
        figure = Figure(figsize=(9.6, 0.7 + 1.9 * len(parts)), layout="constrained")
        rows = figure.subplots(len(parts), 3, squeeze=False, sharey="row")
        for part, (speed_axes, latency_axes, memory_axes) in zip(parts, rows):
            names = part.comparison.names
            count = range(len(names))
            colors = [f"C{index}" for index in count]
            speeds = [part.comparison.images_per_second(index) for index in count]
            _bars(
                speed_axes,
                names,
                [speed.median for speed in speeds],
                [(speed.median - speed.min, speed.max - speed.median) for speed in speeds],
                colors,
            )
            latencies = [_milliseconds(part, index) for index in count]
            beyond = [(0, p99 - median) for median, _, p99 in latencies]
            _bars(latency_axes, names, [median for median, *_ in latencies], beyond, colors)
            megabytes = [peak / 1e6 for peak in part.peak_memory]
            _bars(memory_axes, names, megabytes, [(0, 0)] * len(names), colors)
            speed_axes.invert_yaxis()
            speed_axes.set_title(part.comparison.title, fontsize=9, loc="left")
        for axes, label in zip(
            rows[-1],
            ("images/s: median and range", "ms a call: median, to p99", "MB of memory at most"),
        ):
            axes.set_xlabel(label)
        return svg(figure)


def _bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[tuple[float, float]],
    colors: Sequence[str],
) -> None:
    bars = axes.barh(names, values, xerr=list(zip(*errors)), color=colors, capsize=2, height=0.7)
    told = [f" {value:,.0f}" if value >= 100 else f" {value:.3g}" for value in values]
    axes.bar_label(bars, told, fontsize=7)
    axes.margins(x=0.15)
