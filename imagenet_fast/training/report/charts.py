"""Charts of a run's metrics, for the report or as SVG files."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import FILE_STYLE, PAGE_STYLE, SENTINELS, page_svg, svg
from imagenet_fast.training.metrics_file import Row

if TYPE_CHECKING:
    from typing import TypeGuard  # Since Python 3.10.

# A curve has at most so many points, each the mean of a window: more cannot be seen.
_MAX_POINTS = 300
# A curve of fewer points shows each of them, and is not smoothed.
_FEW_POINTS = 24


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
      label: its name in the chart's key; empty: not there.
      kind: the kind of rows it is drawn from.
      value: the number in the row that it shows.
      color: its color's name in ``COLORS``, which is also the style sheet's variable for it.
      dashed: whether to draw it with dashes.
      noisy: whether single points say little, so that a running mean is what to look at.
    """

    label: str
    kind: str
    value: str
    color: str
    dashed: bool = False
    noisy: bool = False

    def points(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epochs and the values, both float64 [points], that are there and finite."""
        pairs = [
            (row["epoch"], row[self.value])
            for row in rows
            if row.get("kind") == self.kind
            and is_number(row.get("epoch"))
            and is_number(row.get(self.value))
        ]
        epochs, values = np.asarray(pairs, np.float64).reshape(-1, 2).T
        return epochs, values


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing with a title.

    Attributes:
      title: what its values are.
      curves: what is drawn, the most important last, on top.
      percent: whether the values are fractions of 1.
      level: a value to draw a line at.
      level_label: the name of that line in the key.
    """

    title: str
    curves: Sequence[Curve]
    percent: bool = False
    level: float | None = None
    level_label: str = ""

    def render(self, rows: list[Row]) -> str:
        """Returns the chart as an HTML figure; empty if there is nothing to draw."""
        drawn = self._drawn(rows)
        if not drawn:
            return ""
        with matplotlib.style.context(PAGE_STYLE):
            picture = page_svg(self._figure(drawn))
        label = html.escape(f"{self.title} by epoch")
        return (
            f'<figure><figcaption><h2>{html.escape(self.title)}</h2><p class="keys">'
            f"{self._keys(curve for curve, _, _ in drawn)}</p></figcaption>"
            f'<div role="img" aria-label="{label}">{picture}</div></figure>'
        )

    def picture(self, rows: list[Row], title: str) -> str:
        """Returns the chart as an SVG file that needs no page; the curves' names are not in it.

        Args:
          rows: what to draw.
          title: written above.
        """
        with matplotlib.style.context(FILE_STYLE):
            figure = self._figure(self._drawn(rows))
            color = SENTINELS["muted"]
            figure.suptitle(title, x=0.02, ha="left", fontsize=9, color=color)
            figure.axes[0].set_ylabel(self.title.lower())
            return svg(figure)

    def _drawn(self, rows: list[Row]) -> list[tuple[Curve, np.ndarray, np.ndarray]]:
        """Returns the curves that have points, with their epochs and values."""
        return [(curve, *points) for curve in self.curves if len((points := curve.points(rows))[0])]

    def _figure(self, drawn: Sequence[tuple[Curve, np.ndarray, np.ndarray]]) -> Figure:
        figure = Figure(figsize=(5.0, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for curve, epochs, values in drawn:
            _draw(axes, curve, epochs, values)
        if self.level is not None:
            axes.axhline(self.level, color=SENTINELS["muted"], lw=0.9, ls=(0, (1.5, 2.5)))
        self._scale(axes, drawn)
        return figure

    def _scale(self, axes: Axes, drawn: Sequence[tuple[Curve, np.ndarray, np.ndarray]]) -> None:
        everything = np.concatenate([values for _, _, values in drawn])
        lowest, highest = everything.min(), everything.max()
        locator = {"steps": [1, 2, 2.5, 5, 10]}
        axes.set_xlabel("epoch")
        axes.set_xlim(0, max(epochs.max() for _, epochs, _ in drawn) or 1)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(7, **locator))
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.grid(axis="y")
        if self.percent:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        elif lowest > 0 and highest > 200 * np.median(everything):
            # One value far above the others would press them all to the ground.
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        else:
            axes.set_ylim(min(lowest, 0), 1.06 * highest if highest > 0 else None)
            axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, **locator))
            axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))

    def _keys(self, curves: Iterable[Curve]) -> str:
        """Names colors and dashes: a dashed curve's color has its name from a solid one."""
        keys = [
            ("dashed", "muted", curve.label)
            if curve.dashed
            else ("solid", curve.color, curve.label)
            for curve in curves
        ][::-1]
        if self.level is not None:
            keys.append(("dotted", "muted", self.level_label))
        return "".join(
            f'<span><i class="{line}" style="color:var(--{color})"></i>{html.escape(label)}</span>'
            for line, color, label in keys
            if label
        )


LEARNING_RATE = Chart("Learning rate", (Curve("", "train", "learning_rate", "rate"),))


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value of a row is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _draw(axes: Axes, curve: Curve, epochs: np.ndarray, values: np.ndarray) -> None:
    few = len(values) <= _FEW_POINTS
    style: dict[str, Any] = {
        "color": SENTINELS[curve.color],
        "ls": (0, (3.5, 2)) if curve.dashed else "-",
        "clip_on": False,
        # Above the axis: a rate can end near 0.
        "zorder": 3,
    }
    if few or not curve.noisy:
        axes.plot(epochs, values, lw=1.7, marker="o" if few else "", ms=3.6, **style)
        return
    epochs, values = _windows(epochs), _windows(values)
    if not curve.dashed:
        axes.plot(epochs, values, lw=0.9, alpha=0.35, **style)
    axes.plot(epochs, _running_mean(values, len(values) // 40 + 1), lw=1.7, **style)


def _windows(values: np.ndarray) -> np.ndarray:
    """Returns the means of at most ``_MAX_POINTS`` equal windows."""
    if len(values) <= _MAX_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _MAX_POINTS)])


def _running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Returns each value's mean with ``reach`` neighbours on both sides, with fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(places, places[::-1]))
    return (sums[places + reaches + 1] - sums[places - reaches]) / (2 * reaches + 1)
