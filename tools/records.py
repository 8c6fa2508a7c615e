#!/usr/bin/env python3
"""Draws the published training records, and writes the tables of docs/records.md.

    python tools/records.py

reads benchmarks/records/records.json. Numbers that the cost model's validation has already
(imagenet_fast/lab/planning/validation/published.py) are taken from there, by the name of its row,
and its predictions from benchmarks/planning/validation.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "studies"))

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from study import page
from study.style import COLORS, drawn

from imagenet_fast.base.files import write_results
from imagenet_fast.lab.planning.validation.published import ROWS
from imagenet_fast.lab.planning.validation.results import CIFAR, IMAGENET, PublishedResult

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "records" / "records.json"
PREDICTIONS = ROOT / "benchmarks" / "planning" / "validation.json"
PAGE, PICTURE = "records.md", "records.svg"
_SECONDS = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


@dataclasses.dataclass(frozen=True)
class Panel:
    """A data set's records.

    Attributes:
      title: of its plot.
      unit: of its times.
      examples: in an epoch.
      lines: the name of each line of the plot, by its key in the data.
    """

    title: str
    unit: str
    examples: int
    lines: Mapping[str, str]


PANELS = {
    "imagenet": Panel(
        "ImageNet, ResNet-50",
        "minutes",
        IMAGENET,
        {"cluster": "any number of accelerators", "server": "one server of 8 GPUs"},
    ),
    "cifar10": Panel(
        "CIFAR-10, 94% top-1", "seconds", CIFAR, {"one": "one GPU", "several": "8 GPUs"}
    ),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A published result.

    Attributes:
      by: who published it.
      date: year and month, as ``2017-06``.
      line: its line in the plot.
      time: in the panel's unit.
      accelerators: their number.
      chip: their kind.
      epochs: None: not published.
      accuracy: top-1, in percent; MLPerf's is the target.
      source: its address.
      recipe: the recipe that trains it here; empty: none.
      label: where its label is: ``left``, ``right``, ``above`` or ``below``; empty: no label.
      predicted: the cost model's time in the panel's unit; None: the model has no such row.
    """

    by: str
    date: str
    line: str
    time: float
    accelerators: int
    chip: str
    epochs: float | None
    accuracy: float
    source: str
    recipe: str
    label: str
    predicted: float | None

    @property
    def year(self) -> float:
        """The middle of the month, in years."""
        year, month = map(int, self.date.split("-"))
        return year + (month - 0.5) / 12

    @property
    def text(self) -> str:
        """The label."""
        return f"{self.by.removeprefix('DAWNBench, ')}: {self.accelerators:,} {self.chip}"


def read() -> dict[str, list[Entry]]:
    """Returns the records of each panel, in order of the file."""
    rows = {row.name: row for row in ROWS}
    results = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rows"]
    predictions = {row["name"]: row["predicted"] for row in results}
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return {
        name: [_entry(values, panel, rows, predictions) for values in data[name]]
        for name, panel in PANELS.items()
    }


def _entry(
    values: Mapping[str, Any],
    panel: Panel,
    rows: Mapping[str, PublishedResult],
    predictions: Mapping[str, float],
) -> Entry:
    values, predicted = dict(values), None
    if "row" in values:
        row = rows[values.pop("row")]
        predicted = predictions[row.name]
        of_row: dict[str, Any] = {"accelerators": row.run.chips, "chip": _chip(row.run.accelerator)}
        if row.unit in _SECONDS:
            scale = _SECONDS[row.unit] / _SECONDS[panel.unit]
            of_row |= {"time": scale * row.value, "epochs": row.epochs}
            predicted *= scale
        else:
            seconds = values["epochs"] * panel.examples / predicted
            predicted = seconds / _SECONDS[panel.unit]
        if repeated := sorted(of_row.keys() & values.keys()):
            raise ValueError(f"{values['by']}: {', '.join(repeated)} of its row are repeated")
        values |= of_row
    return Entry(**{"epochs": None, "recipe": "", **values, "predicted": predicted})


def _chip(accelerator: str) -> str:
    """Returns the name of a kind of chip, as ``TPU v3`` or ``A100``, from ``--accelerator``'s."""
    kind, _, version = accelerator.partition("-")
    return f"TPU {version}" if kind == "tpu" else kind.upper()


def table(entries: Sequence[Entry], panel: Panel) -> str:
    """Returns the records as a Markdown table, oldest first."""
    head = ["date", "result", "accelerators", panel.unit, "predicted", "epochs", "top-1", "recipe"]
    lines = [head, ["---"] * len(head)]
    for entry in sorted(entries, key=lambda entry: (entry.date, -entry.time)):
        flags = f"../imagenet_fast/flags/{entry.recipe}.flags"
        lines.append(
            [
                entry.date,
                f"[{entry.by}]({entry.source})",
                f"{entry.accelerators:,} {entry.chip}",
                _number(entry.time),
                "" if entry.predicted is None else _number(entry.predicted),
                "" if entry.epochs is None else f"{entry.epochs:g}",
                f"{entry.accuracy:g}",
                f"[{entry.recipe}]({flags})" if entry.recipe else "",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    """Returns three digits, and all before the decimal point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def draw(figure: Figure, records: Mapping[str, Sequence[Entry]]) -> None:
    """Draws a panel for each data set: times on a logarithmic axis against the year."""
    for axes, (name, panel) in zip(figure.subplots(len(PANELS)), PANELS.items()):
        _draw_panel(axes, records[name], panel)


# Offset in points and alignment of labels.
_PLACES: Mapping[str, tuple[tuple[float, float], str, str]] = {
    "left": ((-7, -1), "right", "center"),
    "right": ((7, 1), "left", "center"),
    "above": ((0, 8), "center", "bottom"),
    "below": ((0, -8), "center", "top"),
}


def _draw_panel(axes: Axes, entries: Sequence[Entry], panel: Panel) -> None:
    for (line, title), color in zip(panel.lines.items(), COLORS):
        own = sorted((e for e in entries if e.line == line), key=lambda entry: entry.year)
        axes.plot([e.year for e in own], [e.time for e in own], color=color, lw=0.8, alpha=0.4)
        axes.scatter(
            [e.year for e in own],
            [e.time for e in own],
            # 1 and 4,096 accelerators: 3.5 and 11 points wide.
            [(3.5 + 0.625 * math.log2(e.accelerators)) ** 2 for e in own],
            color=color,
            alpha=0.85,
            lw=0,
            label=title,
            zorder=3,
        )
    for entry in entries:
        if entry.label:
            offset, horizontal, vertical = _PLACES[entry.label]
            axes.annotate(
                entry.text,
                (entry.year, entry.time),
                offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=7,
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(f"{panel.unit} of training")
    axes.set_title(panel.title, loc="left")
    axes.set_xlim(2015.8, 2026.4)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper right", markerscale=1.0)


def picture(records: Mapping[str, Sequence[Entry]]) -> str:
    """Returns the plot as SVG."""
    return drawn(lambda figure: draw(figure, records), (8, 8.5))


def filled_page(text: str, records: Mapping[str, Sequence[Entry]]) -> str:
    """Returns the page with its tables."""
    return page.fill(text, {name: table(records[name], panel) for name, panel in PANELS.items()})


def main(arguments: Sequence[str]) -> int:
    """Writes the plot and the page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    records = read()
    write_results(DATA.parent, {PICTURE: picture(records)})
    page.rewrite(PAGE, lambda text: filled_page(text, records), page.DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
