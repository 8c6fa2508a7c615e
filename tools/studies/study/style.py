"""The style of the studies' plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import PLOT_STYLE, svg
from study.tables import Outcome

COLORS = ("#2f5fe0", "#f0913a", "#0f9d83", "#8250c8", "#667085", "#d03030", "#101828")

_STYLE = [*PLOT_STYLE, {"axes.titlesize": 10, "legend.fontsize": 8}]


def drawn(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Returns a plot as SVG.

    Args:
      draw: draws into the figure.
      size: in inches.
    """
    with matplotlib.style.context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return svg(figure)


def plot_accuracies(axes: Axes, outcomes: Mapping[str, Outcome], color: str) -> None:
    """Plots a row for each outcome: its runs, and their mean and standard deviation.

    Args:
      axes: to draw into.
      outcomes: by the name of the row; those without runs have empty rows.
      color: of the points.
    """
    for place, found in enumerate(outcomes.values()):
        if found.errors:
            runs = [100 * (1 - error) for error in found.errors]
            axes.plot(runs, [place] * len(runs), ".", color=color, alpha=0.4)
            mean, deviation = 100 * (1 - found.mean), 100 * found.deviation
            axes.errorbar(mean, place, xerr=deviation, color=color, marker="o", capsize=3)
    axes.set_yticks(range(len(outcomes)), outcomes)
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.set_xlabel("top-1 accuracy, percent")


def plot_errors(axes: Axes, outcomes: Mapping[float, Outcome], label: str, color: str) -> None:
    """Plots mean errors in percent with their standard deviations.

    Args:
      axes: to draw into.
      outcomes: by position on the x axis; those without runs are skipped.
      label: in the legend.
      color: of the line.
    """
    shown = {place: outcome for place, outcome in outcomes.items() if outcome.errors}
    axes.errorbar(
        list(shown),
        [100 * outcome.mean for outcome in shown.values()],
        [100 * outcome.deviation for outcome in shown.values()],
        label=label,
        color=color,
        marker="o",
        capsize=3,
    )
