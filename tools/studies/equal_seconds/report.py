"""Generates the tables and the plot of docs/equal_seconds.md from the log."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import page, step_times, tables
from study.log import Key, Record
from study.settings import Experiment
from study.style import COLORS, drawn, plot_accuracies

from equal_seconds.experiments import (
    PLAIN,
    RECIPES,
    RESULTS,
    SECONDS,
    Times,
    ingredients,
    recipes,
    seconds_of,
)
from imagenet_fast.base.files import write_results

_EQUAL = 0.05
PAGE, PICTURE = "equal_seconds.md", "frontier.svg"


@dataclasses.dataclass(frozen=True)
class Point:
    """The runs of a setting.

    Attributes:
      method: the recipe, or the ingredient.
      steps: weight updates.
      seconds: CPU seconds of them.
      outcome: of the runs.
    """

    method: str
    steps: int
    seconds: float
    outcome: tables.Outcome

    @property
    def accuracy(self) -> float:
        """The mean accuracy in percent; there must be a run."""
        return 100 * (1 - self.outcome.mean)


def write_report(
    records: Mapping[Key, Record], directory: pathlib.Path, pages: pathlib.Path
) -> None:
    """Writes the plot into ``directory`` and the page with its tables into ``pages``.

    Raises:
      UserError: if they cannot be written, steps were not timed, or the page lacks a table's marks.
    """
    # Of the runs, wherever their log is.
    times = step_times.read(RESULTS, step_times.CPU)
    plot = drawn(lambda figure: _draw(figure, records, times), (10, 4.2))
    write_results(directory, {PICTURE: plot})
    page.rewrite(PAGE, lambda text: filled_page(text, records, times), pages)


def filled_page(text: str, records: Mapping[Key, Record], times: Times) -> str:
    """Returns the page with its tables."""
    of_recipes = points(recipes(times), records, times)
    of_ingredients = points(ingredients(times), records, times)
    parts = {
        "recipes": _recipes_table(of_recipes),
        "ingredients": _ingredients_table(of_ingredients),
    }
    return page.fill(text, parts)


def points(experiment: Experiment, records: Mapping[Key, Record], times: Times) -> list[Point]:
    """Returns the point of each setting of an experiment."""
    return [
        Point(
            setting.method,
            int(setting.config.duration.amount),
            seconds_of(setting, times),
            tables.outcome(setting, records),
        )
        for setting in experiment.settings
    ]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Returns the points than which no other is as fast and more accurate, the fastest first.

    Times that differ by less than ``_EQUAL`` count as equal, because steps are rounded.
    """
    shown = [point for point in points if point.outcome.errors]
    best = [
        point
        for point in shown
        if not any(
            other.accuracy > point.accuracy and other.seconds < (1 + _EQUAL) * point.seconds
            for other in shown
        )
    ]
    return sorted(best, key=lambda point: point.seconds)


def _recipes_table(points: Sequence[Point]) -> str:
    best = frontier(points)
    rows = [[*_cells(point), "yes" if point in best else ""] for point in points]
    return tables.markdown(["", "steps", "CPU seconds", "accuracy", "on the frontier"], rows)


def _ingredients_table(points: Sequence[Point]) -> str:
    plain = points[0].outcome
    rows = []
    for point in points:
        difference = ""
        if point.method != PLAIN and plain.errors and point.outcome.errors:
            error = math.hypot(_standard_error(plain), _standard_error(point.outcome))
            difference = f"{100 * (plain.mean - point.outcome.mean):+.2f} ± {100 * error:.2f}"
        rows.append([*_cells(point), difference])
    heading = ["", "steps", "CPU seconds", "accuracy", "difference, with its standard error"]
    return tables.markdown(heading, rows)


def _cells(point: Point) -> list[str]:
    return [point.method, str(point.steps), f"{point.seconds:.0f}", point.outcome.accuracy]


def _standard_error(found: tables.Outcome) -> float:
    return found.deviation / math.sqrt(len(found.errors))


def _draw(figure: Figure, records: Mapping[Key, Record], times: Times) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_recipes(left, points(recipes(times), records, times))
    of_ingredients = points(ingredients(times), records, times)
    plot_accuracies(right, {point.method: point.outcome for point in of_ingredients}, COLORS[0])
    right.set_title("one ingredient at a time")


def _draw_recipes(axes: Axes, points: Sequence[Point]) -> None:
    """Accuracies against seconds: each run, the means, and the frontier."""
    for name, color in zip(RECIPES, COLORS):
        shown = [point for point in points if point.method == name and point.outcome.errors]
        for point in shown:
            runs = [100 * (1 - error) for error in point.outcome.errors]
            axes.plot([point.seconds] * len(runs), runs, ".", color=color, alpha=0.4)
        if shown:
            places, means = zip(*((point.seconds, point.accuracy) for point in shown))
            axes.plot(places, means, "o-", color=color, label=name)
    best = frontier(points)
    if best:
        places, means = zip(*((point.seconds, point.accuracy) for point in best))
        style = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": COLORS[-1]}
        axes.plot(places, means, "o", label="on the frontier", **style)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xscale("log")
    axes.set_xticks(SECONDS, map(str, SECONDS))
    axes.minorticks_off()
    axes.set_xlabel("CPU seconds of training steps")
    axes.set_ylabel("top-1 accuracy, percent")
