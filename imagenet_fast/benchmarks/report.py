"""A comparison as a table, a JSON file and a picture."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import pathlib
from typing import Any

import matplotlib.style
import matplotlib.ticker
from matplotlib.figure import Figure

from imagenet_fast import environment
from imagenet_fast.benchmarks.timing import Comparison, Spread
from imagenet_fast.errors import UserError
from imagenet_fast.training.checkpoint import write_file

_COLORS = ("#c2410c", "#475467")
_STYLE = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#d0d5dd",
    "grid.linewidth": 0.6,
    # The same numbers give the same file.
    "svg.hashsalt": "imagenet_fast",
}


def table(comparison: Comparison) -> str:
    """Returns the comparison as text, with the hardware that it was made on."""
    width = max(map(len, comparison.names))
    lines = [
        comparison.title,
        *comparison.notes,
        "",
        f"{'':{width}}  {'ms: median':>10} {'min':>9} {'max':>9}  "
        f"{'images/s: median':>16} {'min':>9} {'max':>9}",
    ]
    for index, (name, times) in enumerate(zip(comparison.names, comparison.times)):
        time, speed = Spread.of(times.seconds), comparison.images_per_second(index)
        lines.append(
            f"{name:{width}}  {1e3 * time.median:>10.1f} {1e3 * time.min:>9.1f} "
            f"{1e3 * time.max:>9.1f}  {speed.median:>16.2f} {speed.min:>9.2f} {speed.max:>9.2f}"
        )
    hardware = environment.hardware()
    devices = hardware["gpus"] or [f"{hardware['cpu']}, {hardware['cores']} cores"]
    return "\n".join(
        [
            *lines,
            "",
            f"ratio of times:     {_told(comparison.ratio)}",
            f"ratio of CPU times: {_told(comparison.cpu_ratio)}",
            f"medians of {comparison.repeats} pairs; below 1, {comparison.names[0]} is faster",
            f"on {', '.join(devices)}",
        ]
    )


def write(comparison: Comparison, options: dict[str, Any], directory: str, name: str) -> list[str]:
    """Writes ``NAME.json`` and ``NAME.svg``.

    Args:
      comparison: what to write.
      options: the benchmark's flags and their values.
      directory: where to write; made if it does not exist.
      name: of the files, without suffix.

    Returns:
      The files' paths.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {".json": to_json(comparison, options), ".svg": _picture(comparison)}
    paths = [pathlib.Path(directory, name + suffix) for suffix in texts]
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values()):
            write_file(path, text)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return list(map(str, paths))


def to_json(comparison: Comparison, options: dict[str, Any]) -> str:
    """Returns the comparison with all that is needed to judge it and to repeat it."""
    results = {
        name: {
            "seconds": dataclasses.asdict(Spread.of(times.seconds)),
            "cpu_seconds": dataclasses.asdict(Spread.of(times.cpu_seconds)),
            "images_per_second": dataclasses.asdict(comparison.images_per_second(index)),
            "each_seconds": [round(value, 6) for value in times.seconds],
            "each_cpu_seconds": [round(value, 6) for value in times.cpu_seconds],
        }
        for index, (name, times) in enumerate(zip(comparison.names, comparison.times))
    }
    values = {
        "title": comparison.title,
        "notes": comparison.notes,
        "ratio": dataclasses.asdict(comparison.ratio),
        "cpu_ratio": dataclasses.asdict(comparison.cpu_ratio),
        "n": comparison.repeats,
        "results": results,
        "options": options,
        "command": environment.command(),
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return json.dumps(values, indent=2) + "\n"


def _told(ratio: Spread) -> str:
    return f"{ratio.median:.3f} ({ratio.min:.3f} to {ratio.max:.3f})"


def _picture(comparison: Comparison) -> str:
    """Draws each measurement, and the medians as lines; returns SVG."""
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        repeats = range(1, comparison.repeats + 1)
        for name, times, color in zip(comparison.names, comparison.times, _COLORS):
            median = 1e3 * Spread.of(times.seconds).median
            label = f"{name}: median {median:,.0f} ms"
            axes.plot(repeats, [1e3 * s for s in times.seconds], "o", color=color, label=label)
            axes.axhline(median, color=color, linewidth=1)
        axes.set_ylim(0, 1.08e3 * max(max(times.seconds) for times in comparison.times))
        axes.set_xlim(0.5, comparison.repeats + 0.5)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.set_xlabel("repeat")
        axes.set_ylabel("milliseconds")
        ratios = f"times {_told(comparison.ratio)}, CPU times {_told(comparison.cpu_ratio)}"
        axes.set_title(f"{comparison.title}\nratio of {ratios}", fontsize=9, loc="left")
        axes.legend(loc="lower left", frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
