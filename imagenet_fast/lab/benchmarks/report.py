"""How every benchmark prints its table and writes it as text, JSON and an SVG plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.style
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import PLOT_STYLE, Style, svg
from imagenet_fast.base.terminal import aligned
from imagenet_fast.lab.benchmarks.timing import Comparison, Spread

STYLE: Style = [*PLOT_STYLE, {"axes.grid.axis": "y"}]


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    Attributes:
      text: its tables, for people.
      values: its measurements, for programs; JSON without options and environment.
      draw: makes the figure, in ``STYLE``.
      versions: of packages that were measured in other processes.
    """

    text: str
    values: Mapping[str, Any]
    draw: Callable[[], Figure]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def json(self, options: Mapping[str, Any]) -> str:
        """Returns the measurements with the options and the environment that produced them."""
        provenance = environment.provenance()
        provenance["versions"] = {**provenance["versions"], **self.versions}
        values = {**self.values, "options": options, **provenance}
        return json.dumps(values, indent=2, default=dataclasses.asdict) + "\n"

    def svg(self) -> str:
        """Returns the figure as an SVG file."""
        with matplotlib.style.context(STYLE):
            return svg(self.draw())

    def write(self, options: Mapping[str, Any], directory: str, name: str) -> list[str]:
        """Writes ``NAME.txt``, ``NAME.json`` and ``NAME.svg`` there; returns their paths.

        Raises:
          UserError: if they cannot be written.
        """
        texts = {
            f"{name}.txt": self.text + "\n",
            f"{name}.json": self.json(options),
            f"{name}.svg": self.svg(),
        }
        return write_results(directory, texts)


def make_report(comparison: Comparison) -> Report:
    """Returns the report of a comparison: times, speeds and the ratios to the first variant."""
    return Report(_text(comparison), _values(comparison), lambda: _figure(comparison))


def spread_cells(spread: Spread, form: str) -> list[str]:
    """Returns the median, minimum and maximum as cells of a table, in a format such as ``.1f``."""
    return [f"{value:{form}}" for value in (spread.median, spread.min, spread.max)]


def _spread_text(spread: Spread, form: str = ".3f") -> str:
    """Returns ``median (min to max)``."""
    median, low, high = spread_cells(spread, form)
    return f"{median} ({low} to {high})"


def devices() -> str:
    """Returns the names of the GPUs, or of the CPU and its number of cores."""
    hardware = environment.hardware()
    return ", ".join(hardware["gpus"]) or cpu()


def cpu() -> str:
    """Returns the name of the CPU and its number of cores."""
    hardware = environment.hardware()
    return f"{hardware['cpu']}, {hardware['cores']} cores"


def values_of(results: Sequence[float]) -> list[float]:
    """Returns single measurements as they are written: in seconds, to a microsecond."""
    return [round(value, 6) for value in results]


def draw_bars(
    axes: Axes, names: Sequence[str], spreads: Sequence[Spread], colors: Sequence[str]
) -> None:
    """Draws a horizontal bar to each median, with a whisker from minimum to maximum."""
    medians = [spread.median for spread in spreads]
    whiskers = [
        [spread.median - spread.min for spread in spreads],
        [spread.max - spread.median for spread in spreads],
    ]
    bars = axes.barh(names, medians, xerr=whiskers, color=colors, capsize=2, height=0.7)
    labels = [f" {value:,.0f}" if value >= 100 else f" {value:.3g}" for value in medians]
    axes.bar_label(bars, labels, fontsize=7)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def _text(comparison: Comparison) -> str:
    with_speed = comparison.images is not None
    head = ["", "ms: median", "min", "max"] + ["images/s: median", "min", "max"] * with_speed
    rows = [head]
    for index, (name, times) in enumerate(zip(comparison.names, comparison.times)):
        milliseconds = Spread.of([1e3 * seconds for seconds in times.seconds])
        row = [name, *spread_cells(milliseconds, ".1f")]
        if with_speed:
            row += spread_cells(comparison.images_per_second(index), ".2f")
        rows.append(row)
    first, *others = comparison.names
    ratios, cpu_ratios = comparison.ratios, comparison.cpu_ratios
    ratio_rows = [[f"{first} to", "ratio of times", "ratio of CPU times"]]
    ratio_rows += [
        [name, _spread_text(ratios[name]), _spread_text(cpu_ratios[name])] for name in others
    ]
    lines = [comparison.title, *comparison.notes, "", *aligned(rows)]
    lines += ["", *aligned(ratio_rows, left=range(3))]
    if comparison.fractions:
        lines += ["", f"fractions of {first}'s time"]
        for name, fraction in comparison.fractions.items():
            percent = Spread(*(100 * value for value in vars(fraction).values()))
            lines.append(f"{name}: {_spread_text(percent, '.1f')} %")
    return "\n".join(
        [
            *lines,
            "",
            f"medians of {comparison.repeats} repeats; below 1, {first} is faster",
            f"on {devices()}",
        ]
    )


def _values(comparison: Comparison) -> dict[str, Any]:
    results = {}
    for index, (name, times) in enumerate(zip(comparison.names, comparison.times)):
        results[name] = {
            "seconds": Spread.of(times.seconds),
            "cpu_seconds": Spread.of(times.cpu_seconds),
            "each_seconds": values_of(times.seconds),
            "each_cpu_seconds": values_of(times.cpu_seconds),
        }
        if comparison.images is not None:
            results[name]["images_per_second"] = comparison.images_per_second(index)
    return {
        "title": comparison.title,
        "notes": comparison.notes,
        "ratio_of": comparison.names[0],
        "ratio_to": comparison.ratios,
        "cpu_ratio_to": comparison.cpu_ratios,
        "n": comparison.repeats,
        "results": results,
        **({"shares": comparison.fractions} if comparison.fractions else {}),
    }


def _figure(comparison: Comparison) -> Figure:
    """Draws every measurement as a dot and the medians as lines."""
    first, *_ = comparison.names
    figure = Figure(figsize=(6.4, 3.4 + 0.2 * len(comparison.names)), layout="constrained")
    axes = figure.add_subplot()
    repeats = range(1, comparison.repeats + 1)
    for name, times in zip(comparison.names, comparison.times):
        median = 1e3 * Spread.of(times.seconds).median
        label = f"{name}: median {median:,.1f} ms"
        if name != first:
            label += f"; {first} to it: {_spread_text(comparison.ratios[name])}"
        (dots,) = axes.plot(repeats, [1e3 * s for s in times.seconds], "o", label=label)
        axes.axhline(median, color=dots.get_color(), linewidth=1)
    axes.set_ylim(0, 1.08e3 * max(max(times.seconds) for times in comparison.times))
    axes.set_xlim(0.5, comparison.repeats + 0.5)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel("repeat")
    axes.set_ylabel("milliseconds")
    axes.set_title(comparison.title, fontsize=9, loc="left")
    figure.legend(loc="outside lower left", frameon=False)
    return figure
