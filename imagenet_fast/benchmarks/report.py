"""A comparison as a table, a JSON file and a picture."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import matplotlib.style
import matplotlib.ticker
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import PLOT_STYLE, Style, svg
from imagenet_fast.benchmarks.timing import Comparison, Spread

STYLE: Style = [*PLOT_STYLE, {"axes.grid.axis": "y"}]


def table(comparison: Comparison) -> str:
    """Returns the comparison as text, with the hardware that it was made on."""
    width = max(map(len, comparison.names))
    head = f"{'':{width}}  {'ms: median':>10} {'min':>9} {'max':>9}"
    if comparison.images is not None:
        head += f"  {'images/s: median':>16} {'min':>9} {'max':>9}"
    lines = [comparison.title, *comparison.notes, "", head]
    for index, (name, times) in enumerate(zip(comparison.names, comparison.times)):
        time = Spread.of(times.seconds)
        line = (
            f"{name:{width}}  {1e3 * time.median:>10.1f} {1e3 * time.min:>9.1f} "
            f"{1e3 * time.max:>9.1f}"
        )
        if comparison.images is not None:
            speed = comparison.images_per_second(index)
            line += f"  {speed.median:>16.2f} {speed.min:>9.2f} {speed.max:>9.2f}"
        lines.append(line)
    first, *others = comparison.names
    ratios, cpu_ratios = comparison.ratios, comparison.cpu_ratios
    width = max(width, len(f"{first} to"))
    lines += ["", f"{f'{first} to':{width}}  {'ratio of times':23}  ratio of CPU times"]
    for name in others:
        lines.append(f"{name:{width}}  {_told(ratios[name]):23}  {_told(cpu_ratios[name])}")
    if comparison.shares:
        lines += ["", f"of {first}'s time"]
        lines += [
            f"{name}: {100 * share.median:.1f}% ({100 * share.min:.1f} to {100 * share.max:.1f}%)"
            for name, share in comparison.shares.items()
        ]
    hardware = environment.hardware()
    devices = hardware["gpus"] or [f"{hardware['cpu']}, {hardware['cores']} cores"]
    return "\n".join(
        [
            *lines,
            "",
            f"medians of {comparison.repeats} turns; below 1, {first} is faster",
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
    texts = {f"{name}.json": to_json(comparison, options), f"{name}.svg": _picture(comparison)}
    return write_results(directory, texts)


def to_json(comparison: Comparison, options: dict[str, Any]) -> str:
    """Returns the comparison with all that is needed to judge it and to repeat it."""
    results = {}
    for index, (name, times) in enumerate(zip(comparison.names, comparison.times)):
        results[name] = {
            "seconds": Spread.of(times.seconds),
            "cpu_seconds": Spread.of(times.cpu_seconds),
            "each_seconds": [round(value, 6) for value in times.seconds],
            "each_cpu_seconds": [round(value, 6) for value in times.cpu_seconds],
        }
        if comparison.images is not None:
            results[name]["images_per_second"] = comparison.images_per_second(index)
    values = {
        "title": comparison.title,
        "notes": comparison.notes,
        "ratio_of": comparison.names[0],
        "ratio_to": comparison.ratios,
        "cpu_ratio_to": comparison.cpu_ratios,
        "n": comparison.repeats,
        "results": results,
        **({"shares": comparison.shares} if comparison.shares else {}),
        "options": options,
        **environment.provenance(),
    }
    return json.dumps(values, indent=2, default=dataclasses.asdict) + "\n"


def _told(ratio: Spread) -> str:
    return f"{ratio.median:.3f} ({ratio.min:.3f} to {ratio.max:.3f})"


def _picture(comparison: Comparison) -> str:
    """Draws each measurement, and the medians as lines; returns SVG."""
    first, *_ = comparison.names
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(6.4, 3.4 + 0.2 * len(comparison.names)), layout="constrained")
        axes = figure.add_subplot()
        repeats = range(1, comparison.repeats + 1)
        for name, times in zip(comparison.names, comparison.times):
            median = 1e3 * Spread.of(times.seconds).median
            label = f"{name}: median {median:,.1f} ms"
            if name != first:
                label += f"; {first} to it: {_told(comparison.ratios[name])}"
            (dots,) = axes.plot(repeats, [1e3 * s for s in times.seconds], "o", label=label)
            axes.axhline(median, color=dots.get_color(), linewidth=1)
        axes.set_ylim(0, 1.08e3 * max(max(times.seconds) for times in comparison.times))
        axes.set_xlim(0.5, comparison.repeats + 0.5)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.set_xlabel("repeat")
        axes.set_ylabel("milliseconds")
        axes.set_title(comparison.title, fontsize=9, loc="left")
        figure.legend(loc="outside lower left", frameon=False)
        return svg(figure)
