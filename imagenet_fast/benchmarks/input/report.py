"""The input benchmark as a table, a JSON file and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import PLOT_STYLE, svg
from imagenet_fast.benchmarks.input.peers import PEERS
from imagenet_fast.benchmarks.timing import Comparison, Spread

# Whose ways do all that the ways before them do.
_CUMULATIVE = ("stages",)


def table(parts: Mapping[str, Comparison], cores: int, consumes: float) -> str:
    """Returns the parts as text, and what they say of the host.

    Args:
      parts: by name.
      cores: that the pipeline was given.
      consumes: images a second that the accelerators of a host take; 0: unknown.
    """
    width = max(len(name) for part in parts.values() for name in part.names)
    lines = []
    for name, part in parts.items():
        lines += [*_part_lines(part, width, cumulative=name in _CUMULATIVE), ""]
    hardware = environment.hardware()
    repeats = next(iter(parts.values())).repeats
    lines += [f"medians of {repeats} turns, on {hardware['cpu']}, {hardware['cores']} cores"]
    return "\n".join(lines + _host_lines(parts, cores, consumes))


def write(
    parts: Mapping[str, Comparison],
    cores: int,
    consumes: float,
    options: dict[str, Any],
    directory: str,
) -> list[str]:
    """Writes ``input.txt``, ``input.json`` and ``input.svg``; returns their paths.

    Args:
      parts: by name.
      cores: that the pipeline was given.
      consumes: images a second that the accelerators of a host take; 0: unknown.
      options: the benchmark's flags and their values.
      directory: where to write; made if it does not exist.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {
        "input.txt": table(parts, cores, consumes) + "\n",
        "input.json": _to_json(parts, options),
        "input.svg": _picture(parts),
    }
    return write_results(directory, texts)


def _part_lines(part: Comparison, width: int, *, cumulative: bool) -> list[str]:
    first, *others = part.names
    last = "added" if cumulative else f"{first} to it: by the clock, by CPU time"
    lines = [f"{part.title}; {part.images} images a sample", *part.notes]
    head = f"{'':{width}}  {'images/s: median':>16} {'min':>8} {'max':>8}  {'CPU us/image':>12}"
    lines.append(f"{head}  {last}")
    ratios, cpu_ratios = part.ratios, part.cpu_ratios
    before = 0.0
    for index, name in enumerate(part.names):
        speed = part.images_per_second(index)
        cpu = _cpu_microseconds(part, index)
        line = (
            f"{name:{width}}  {speed.median:>16,.0f} {speed.min:>8,.0f} {speed.max:>8,.0f}  "
            f"{cpu.median:>12,.0f}"
        )
        if cumulative:
            line += f"  {cpu.median - before:>5,.0f}"
            before = cpu.median
        elif name in others:
            line += f"  {_inverse(ratios[name])}, {_inverse(cpu_ratios[name])}"
        lines.append(line)
    return lines


def _host_lines(parts: Mapping[str, Comparison], cores: int, consumes: float) -> list[str]:
    """Returns what this package's speed is worth to accelerators."""
    own = PEERS["own"]
    part = next((part for part in parts.values() if own in part.names), None)
    if part is None:
        return []
    speed = part.images_per_second(part.names.index(own)).median
    line = f"{own} makes {speed:,.0f} images/s on {cores} cores: {speed / cores:,.0f} a core"
    if not consumes:
        return [line]
    needed = math.ceil(consumes * cores / speed)
    return [
        line,
        f"the accelerators take {consumes:,.0f} images/s, {consumes / speed:.3g} times as many: "
        f"they need {needed} such cores, or {math.ceil(consumes / speed)} such hosts for each of "
        "theirs",
    ]


def _cpu_microseconds(part: Comparison, index: int) -> Spread:
    """Returns the CPU time that one of the ways takes for an image."""
    assert part.images
    return Spread.of([1e6 * each / part.images for each in part.times[index].cpu_seconds])


def _inverse(ratio: Spread) -> str:
    """Tells a ratio of times as one of speeds."""
    return f"{1 / ratio.median:.3g}x ({1 / ratio.max:.3g} to {1 / ratio.min:.3g})"


def _to_json(parts: Mapping[str, Comparison], options: dict[str, Any]) -> str:
    values = {
        "n": next(iter(parts.values())).repeats,
        "parts": {name: _part_values(part) for name, part in parts.items()},
        "options": options,
        **environment.provenance(),
    }
    return json.dumps(values, indent=2) + "\n"


def _part_values(part: Comparison) -> dict[str, Any]:
    ways = {
        name: {
            "images_per_second": vars(part.images_per_second(index)),
            "cpu_microseconds_per_image": vars(_cpu_microseconds(part, index)),
            "each_seconds": [round(value, 6) for value in part.times[index].seconds],
            "each_cpu_seconds": [round(value, 6) for value in part.times[index].cpu_seconds],
        }
        for index, name in enumerate(part.names)
    }
    return {"title": part.title, "notes": part.notes, "images": part.images, "ways": ways}


def _picture(parts: Mapping[str, Comparison]) -> str:
    """Draws the median speed of each way with its range; returns SVG."""
    rows = [len(part.names) + 1.5 for part in parts.values()]
    with matplotlib.style.context([*PLOT_STYLE, {"axes.grid.axis": "x"}]):
        figure = Figure(figsize=(6.4, 0.4 + 0.26 * sum(rows)), layout="constrained")
        panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=rows)[:, 0]
        for axes, part in zip(panels, parts.values()):
            speeds = [part.images_per_second(index) for index in range(len(part.names))]
            medians = [speed.median for speed in speeds]
            ranges = [
                [speed.median - speed.min for speed in speeds],
                [speed.max - speed.median for speed in speeds],
            ]
            colors = ["C0", *["C1"] * (len(part.names) - 1)]
            axes.barh(part.names, medians, xerr=ranges, color=colors, capsize=2, height=0.7)
            axes.invert_yaxis()
            axes.set_title(part.title, fontsize=9, loc="left")
            axes.bar_label(
                axes.containers[-1], [f" {median:,.0f}" for median in medians], fontsize=7
            )
        panels[-1].set_xlabel("images/s: median and range")
        return svg(figure)
