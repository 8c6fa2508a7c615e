"""Results of a search: a table, a CSV file, a plot, and the best values as a flagfile."""

from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Sequence

import matplotlib.style
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base.files import write_results
from imagenet_fast.base.option import option_text
from imagenet_fast.base.plotting import COLORS, PLOT_STYLE, svg
from imagenet_fast.lab.benchmarks.report import aligned
from tuning.plan import Choices, Plan, Searched
from tuning.study import COARSE, COMPLETE, DIVERGED, FINE, PRUNED, Outcome, best_of, ranked

CSV_FILE, PICTURE_FILE, BEST_FILE = "results.csv", "study.svg", "best.flags"

_MAX_COLUMNS = 3
# The axis of errors is linear below it, and logarithmic above.
_LINEAR_ERROR = 0.01
_ERROR_TICKS = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
# Offsets of trials with the same choice, so that they are visible side by side.
_JITTER = 0.08
# Labels and markers by (state, round).
_MARKS = {
    (COMPLETE, COARSE): ("complete", {"marker": "o", "color": COLORS["validation"][0]}),
    (COMPLETE, FINE): ("complete, fine round", {"marker": "o", "color": COLORS["train"][0]}),
    (PRUNED, COARSE): (
        "ended early",
        {"marker": "o", "facecolor": "none", "edgecolor": COLORS["validation"][0]},
    ),
    (PRUNED, FINE): (
        "ended early, fine round",
        {"marker": "o", "facecolor": "none", "edgecolor": COLORS["train"][0]},
    ),
    (DIVERGED, COARSE): ("diverged", {"marker": "x", "color": COLORS["validation"][0]}),
    (DIVERGED, FINE): ("diverged, fine round", {"marker": "x", "color": COLORS["train"][0]}),
}


def trial_name(number: int) -> str:
    """Returns the name of a trial's folder in the study's."""
    return f"trial_{number:03d}"


def write(outcomes: Sequence[Outcome], plan: Plan) -> None:
    """Writes ``results.csv``, ``study.svg`` and, if a trial is complete, ``best.flags``.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {CSV_FILE: to_csv(outcomes, plan.space), PICTURE_FILE: picture(outcomes, plan.space)}
    best = best_of(outcomes)
    if best:
        texts[BEST_FILE] = _best_flags(best, len(outcomes), plan.directory)
    write_results(plan.directory, texts)


def table(outcomes: Sequence[Outcome], space: Sequence[Searched]) -> str:
    """Returns a table of all trials, from the best to the worst."""
    rows = [["trial", "round", "state", "error", "seconds", *(s.option for s in space)]]
    rows += [
        [
            str(outcome.number),
            outcome.round,
            outcome.state,
            "" if outcome.error is None else f"{outcome.error:.2%}",
            f"{outcome.seconds:.0f}",
            *(option_text(outcome.values[s.option]) for s in space),
        ]
        for outcome in ranked(outcomes)
    ]
    return "\n".join(aligned(rows, left=()))


def to_csv(outcomes: Sequence[Outcome], space: Sequence[Searched]) -> str:
    """Returns all trials as a CSV file, in the order in which they began.

    Columns: trial, round, state, validation_error (a fraction; empty after a failure), seconds, and
    each searched option as in a flagfile.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [searched.option for searched in space]
    writer.writerow(["trial", "round", "state", "validation_error", "seconds", *names])
    for outcome in outcomes:
        error = "" if outcome.error is None else f"{outcome.error:.6f}"
        values = [option_text(outcome.values[name]) for name in names]
        seconds = f"{outcome.seconds:.1f}"
        writer.writerow([outcome.number, outcome.round, outcome.state, error, seconds, *values])
    return file.getvalue()


def _best_flags(best: Outcome, count: int, directory: pathlib.Path) -> str:
    path = directory / BEST_FILE
    flags = [f"--{name}={option_text(value)}\n" for name, value in best.values.items()]
    return (
        f"# The best of {count} trials: trial {best.number}, with {best.error:.2%} validation "
        "error.\n"
        "# To be used after the searched recipe:\n"
        "#\n"
        f"#   imagenet-fast train --flagfile=RECIPE --flagfile={path} ...\n\n"
    ) + "".join(flags)


def picture(outcomes: Sequence[Outcome], space: Sequence[Searched]) -> str:
    """Returns a plot of the error against each option, in a panel each, as SVG."""
    rows = math.ceil(len(space) / _MAX_COLUMNS)
    columns = math.ceil(len(space) / rows)
    with matplotlib.style.context(PLOT_STYLE):
        figure = Figure(figsize=(0.6 + 3.1 * columns, 0.5 + 2.6 * rows), layout="constrained")
        for index, searched in enumerate(space):
            axes = figure.add_subplot(rows, columns, index + 1)
            _draw(axes, searched, outcomes)
            first = index % columns == 0
            axes.set_ylabel("validation error" if first else "")
            axes.tick_params(labelleft=first)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if handles:
            place = {"loc": "outside upper left", "ncols": columns + 1, "frameon": False}
            figure.legend(handles, labels, **place)
        return svg(figure)


def _draw(axes: Axes, searched: Searched, outcomes: Sequence[Outcome]) -> None:
    for (state, round_), (label, style) in _MARKS.items():
        drawn = [o for o in outcomes if (o.state, o.round) == (state, round_)]
        if drawn:
            places = [_place(searched, outcome) for outcome in drawn]
            # Diverged trials are drawn on the frame.
            axes.scatter(
                places, [o.error for o in drawn], s=26, label=label, clip_on=False, **style
            )
    best = best_of(outcomes)
    if best:
        axes.scatter(
            [_place(searched, best)],
            [best.error],
            s=130,
            facecolor="none",
            edgecolor="black",
            linewidth=1.2,
            label="best",
            clip_on=False,
        )
    _scale_errors(axes, outcomes)
    _scale_values(axes, searched)


def _place(searched: Searched, outcome: Outcome) -> float:
    """Returns an outcome's position on the axis of an option."""
    value = outcome.values[searched.option]
    if isinstance(searched, Choices):
        return searched.ends().index(value) + _JITTER * (outcome.number % 5 - 2)
    return searched.number(value)


def _scale_errors(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None] or [0.0, 1.0]
    axes.set_yscale("symlog", linthresh=_LINEAR_ERROR)
    axes.set_ylim(
        max((tick for tick in _ERROR_TICKS if tick < min(errors)), default=0),
        min((tick for tick in _ERROR_TICKS if tick > max(errors)), default=1),
    )
    axes.yaxis.set_major_locator(matplotlib.ticker.FixedLocator(_ERROR_TICKS))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda error, _: f"{100 * error:g}%")


def _scale_values(axes: Axes, searched: Searched) -> None:
    if isinstance(searched, Choices):
        axes.set_xlabel(searched.option)
        axes.set_xlim(-0.5, len(searched.texts) - 0.5)
        axes.set_xticks(range(len(searched.texts)), searched.texts)
        return
    axes.set_xlabel(searched.option + (f" ({searched.unit})" if searched.unit else ""))
    if searched.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        # Small numbers are long, so fewer of them fit.
        few = searched.high / searched.low <= (100 if searched.low >= 0.01 else 10)
        minor = matplotlib.ticker.LogLocator(subs=(2, 5)) if few else None
        axes.xaxis.set_minor_locator(minor or matplotlib.ticker.NullLocator())
        axes.xaxis.set_minor_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlim(searched.low, searched.high)
