"""The report of the input benchmark: a table and a bar chart for each of its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from imagenet_fast.base.counted import counted
from imagenet_fast.base.terminal import aligned
from imagenet_fast.lab.benchmarks.input.peers import PEERS
from imagenet_fast.lab.benchmarks.report import (
    Report,
    cpu,
    draw_bars,
    spread_cells,
    values_of,
)
from imagenet_fast.lab.benchmarks.timing import Comparison, Spread

# Parts whose variants each include the work of those before.
_CUMULATIVE = ("stages",)


def make_report(parts: Mapping[str, Comparison], cores: int, consumes: float) -> Report:
    """Returns the report of some parts of the benchmark.

    Args:
      parts: by name.
      cores: that the pipeline uses.
      consumes: images/s that a host's accelerators consume; 0: unknown.
    """
    lines = []
    for name, part in parts.items():
        lines += [*_part_lines(part, cumulative=name in _CUMULATIVE), ""]
    repeats = next(iter(parts.values())).repeats
    lines += [f"medians of {repeats} repeats, on {cpu()}", *_host_lines(parts, cores, consumes)]
    values = {"n": repeats, "parts": {name: _values(part) for name, part in parts.items()}}
    return Report("\n".join(lines), values, lambda: _figure(parts))


def _part_lines(part: Comparison, *, cumulative: bool) -> list[str]:
    first, *others = part.names
    last = ["added"] if cumulative else [f"speed of {first} to it", "by CPU time"]
    rows = [["", "images/s: median", "min", "max", "CPU us/image", *last]]
    ratios, cpu_ratios = part.ratios, part.cpu_ratios
    before = 0.0
    for index, name in enumerate(part.names):
        median = _cpu_microseconds(part, index).median
        row = [name, *spread_cells(part.images_per_second(index), ",.0f"), f"{median:,.0f}"]
        if cumulative:
            row.append(f"{median - before:,.0f}")
            before = median
        elif name in others:
            row += [_speed_ratio(ratios[name]), _speed_ratio(cpu_ratios[name])]
        else:
            row += ["", ""]
        rows.append(row)
    return [f"{part.title}; {part.images} images in a sample", *part.notes, *aligned(rows)]


def _host_lines(parts: Mapping[str, Comparison], cores: int, consumes: float) -> list[str]:
    """Returns this package's speed per core, and the cores that the accelerators need."""
    this = PEERS["own"]
    part = next((part for part in parts.values() if this in part.names), None)
    if part is None:
        return []
    speed = part.images_per_second(part.names.index(this)).median
    line = f"{this} makes {speed:,.0f} images/s on {cores} cores: {speed / cores:,.0f} per core"
    if not consumes:
        return [line]
    needed, hosts = math.ceil(consumes * cores / speed), math.ceil(consumes / speed)
    return [
        line,
        f"the accelerators consume {consumes:,.0f} images/s, {consumes / speed:.3g} times that: "
        f"they need {counted(needed, 'such core')}, or {counted(hosts, 'such host')} for each of "
        "theirs",
    ]


def _cpu_microseconds(part: Comparison, index: int) -> Spread:
    """Returns a variant's CPU time per image."""
    assert part.images
    return Spread.of([1e6 * seconds / part.images for seconds in part.times[index].cpu_seconds])


def _speed_ratio(ratio: Spread) -> str:
    """Writes a ratio of times as one of speeds."""
    return f"{1 / ratio.median:.3g}x ({1 / ratio.max:.3g} to {1 / ratio.min:.3g})"


def _values(part: Comparison) -> dict[str, Any]:
    variants = {
        name: {
            "images_per_second": part.images_per_second(index),
            "cpu_microseconds_per_image": _cpu_microseconds(part, index),
            "each_seconds": values_of(part.times[index].seconds),
            "each_cpu_seconds": values_of(part.times[index].cpu_seconds),
        }
        for index, name in enumerate(part.names)
    }
    return {"title": part.title, "notes": part.notes, "images": part.images, "ways": variants}


def _figure(parts: Mapping[str, Comparison]) -> Figure:
    """Draws the median speed of each variant with its range."""
    rows = [len(part.names) + 1.5 for part in parts.values()]
    figure = Figure(figsize=(6.4, 0.4 + 0.26 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, part in zip(panels, parts.values()):
        speeds = [part.images_per_second(index) for index in range(len(part.names))]
        draw_bars(axes, part.names, speeds, ["C0", *["C1"] * (len(part.names) - 1)])
        axes.invert_yaxis()
        axes.set_title(part.title, fontsize=9, loc="left")
    panels[-1].set_xlabel("images/s: median and range")
    return figure
