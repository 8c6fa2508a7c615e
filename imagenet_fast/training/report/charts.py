"""Charts of a run's metrics, for the report or as SVG files."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import FILE_STYLE, PAGE_STYLE, SENTINELS, page_svg, svg
from imagenet_fast.training.logs.metrics_file import Row
from imagenet_fast.training.options import metric_of
from imagenet_fast.training.report import formats
from imagenet_fast.training.report.formats import is_number

# A curve has at most this many points, each the mean of a window: more would not be visible.
_MAX_POINTS = 300
# Curves with at most this many points show each of them, without smoothing.
_FEW_POINTS = 24
# A change between two points is a jump if it is this many times as steep as those around it.
_JUMP = 10


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
      label: its name in the chart's legend; empty: it is not listed.
      kind: the rows' ``kind``.
      value: the name of the value in these rows.
      color: its color's name in ``COLORS`` and in the style sheet.
      dashed: whether to draw it with dashes.
      noisy: whether to draw a running mean above the points.
      jumps: whether to draw jumps between flat parts as steps.
    """

    label: str
    kind: str
    value: str
    color: str
    dashed: bool = False
    noisy: bool = False
    jumps: bool = False

    def points(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epochs and the values of all finite points, both float64 [points]."""
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
    """A chart of some curves.

    Attributes:
      title: names the values.
      curves: the curves, the most important last, on top.
      percent: whether the values are fractions of 1.
      level: a value to mark by a line.
      level_label: the name of that line in the legend.
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
            drawing = page_svg(self._figure(drawn))
        label = html.escape(f"{self.title} by epoch")
        return (
            f'<figure><figcaption><h2>{html.escape(self.title)}</h2><p class="keys">'
            f"{self._legend(curve for curve, _, _ in drawn)}</p></figcaption>"
            f'<div role="img" aria-label="{label}">{drawing}</div></figure>'
        )

    def picture(self, rows: list[Row], title: str) -> str:
        """Returns the chart as a self-contained SVG file, without a legend."""
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
        all_values = np.concatenate([values for _, _, values in drawn])
        lowest, highest = all_values.min(), all_values.max()
        locator = {"steps": [1, 2, 2.5, 5, 10]}
        axes.set_xlabel("epoch")
        axes.set_xlim(0, max(epochs.max() for _, epochs, _ in drawn) or 1)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(7, **locator))
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.grid(axis="y")
        if self.percent:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        elif lowest > 0 and highest > 200 * np.median(all_values):
            # On a linear axis, one huge value would flatten all others.
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        else:
            axes.set_ylim(min(lowest, 0), 1.06 * highest if highest > 0 else None)
            axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, **locator))
            axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))

    def _legend(self, curves: Iterable[Curve]) -> str:
        """Names colours and dashes; a dashed curve has the colour of a named solid one."""
        entries = [
            ("dashed", "muted", curve.label)
            if curve.dashed
            else ("solid", curve.color, curve.label)
            for curve in curves
        ][::-1]
        if self.level is not None:
            entries.append(("dotted", "muted", self.level_label))
        return "".join(
            f'<span><i class="{line}" style="color:var(--{color})"></i>{html.escape(label)}</span>'
            for line, color, label in entries
            if label
        )


LEARNING_RATE = Chart("Learning rate", (Curve("", "train", "learning_rate", "rate", jumps=True),))


def target_of(summary: dict[str, Any]) -> float | None:
    """Returns the accuracy, or other metric, at which a run was to end; None: there was none."""
    return summary.get(f"target_{metric_of(summary)}")


def run_charts(summary: dict[str, Any], rows: list[Row], has_top5: bool) -> list[str]:
    """Returns the charts of a run as HTML figures."""
    target, speed = target_of(summary), summary.get("images_per_second")
    has_speed = is_number(speed) and speed > 0
    # Rows of untimed steps, such as each process' first, have no speed.
    timed = [row for row in rows if row.get("images_per_second") != 0]
    top5 = (
        Curve("", "validation", "top5", "validation", dashed=True),
        Curve("top-5", "train", "top5", "train", dashed=True, noisy=True),
    )
    title = "Accuracy"
    curves = (
        *(top5 if has_top5 else ()),
        Curve("train", "train", "top1", "train", noisy=True),
        Curve("validation", "validation", "top1", "validation"),
    )
    if metric_of(summary) == "map":
        title = "Mean average precision and micro F1"
        curves = (
            Curve("micro F1", "validation", "f1_micro", "validation", dashed=True),
            Curve("mAP", "validation", "map", "validation"),
        )
    accuracy = Chart(
        title,
        curves,
        percent=True,
        level=target if is_number(target) else None,
        level_label=f"target {formats.target(target)}",
    )
    loss = Chart(
        "Loss",
        (
            Curve("train", "train", "loss", "train", noisy=True),
            Curve("validation", "validation", "loss", "validation"),
        ),
    )
    throughput = Chart(
        "Images per second",
        (Curve("", "train", "images_per_second", "speed", noisy=True),),
        level=speed if has_speed else None,
        level_label=f"mean {formats.number(speed)}",
    )
    return [
        accuracy.render(rows),
        loss.render(rows),
        LEARNING_RATE.render(rows),
        throughput.render(timed),
    ]


def _draw(axes: Axes, curve: Curve, epochs: np.ndarray, values: np.ndarray) -> None:
    few = len(values) <= _FEW_POINTS
    style: dict[str, Any] = {
        "color": SENTINELS[curve.color],
        "ls": (0, (3.5, 2)) if curve.dashed else "-",
        "clip_on": False,
        # Above the axis: a learning rate can end near 0.
        "zorder": 3,
    }
    if few or not curve.noisy:
        jumps = _jumps(epochs, values) if curve.jumps else np.zeros(0, int)
        # Right after the point before: recipes let the learning rate decay after an evaluation.
        points = np.arange(len(values))
        line = points + np.searchsorted(jumps, points)  # where they are in the line
        epochs = np.insert(epochs, jumps + 1, epochs[jumps])
        values = np.insert(values, jumps + 1, values[jumps + 1])
        marker = "o" if few else ""
        axes.plot(epochs, values, lw=1.7, marker=marker, ms=3.6, markevery=line.tolist(), **style)
        return
    epochs, values = _windows(epochs), _windows(values)
    if not curve.dashed:
        axes.plot(epochs, values, lw=0.9, alpha=0.35, **style)
    axes.plot(epochs, _running_mean(values, len(values) // 40 + 1), lw=1.7, **style)


def _jumps(epochs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the indices of the points before jumps, int [jumps].

    A jump is a change between two points with flat parts before and, unless it is the last one,
    behind it. A change at the beginning counts as a warmup.
    """
    slopes = np.abs(np.diff(values)) / np.maximum(np.diff(epochs), 1e-9)
    if len(slopes) < 2:
        return np.zeros(0, int)
    around = np.maximum(slopes[:-1], np.append(slopes[2:], 0))
    return 1 + np.flatnonzero(slopes[1:] > _JUMP * around)


def _windows(values: np.ndarray) -> np.ndarray:
    """Returns the means of at most ``_MAX_POINTS`` equal windows."""
    if len(values) <= _MAX_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _MAX_POINTS)])


def _running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Returns each value's mean with ``reach`` neighbours on both sides, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(index, index[::-1]))
    return (sums[index + reaches + 1] - sums[index - reaches]) / (2 * reaches + 1)
