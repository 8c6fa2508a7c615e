"""Generates the tables and plots of docs/large_batch.md from the log."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import page, tables
from study.log import Key, Record
from study.settings import Experiment
from study.style import COLORS, drawn, plot_errors

from imagenet_fast.base.files import write_results
from large_batch import papers
from large_batch.experiments import EXPERIMENTS, half_precision, pool5, scaling

PAGE = "large_batch.md"
SCALING_PICTURE, POOL5_PICTURE = "scaling.svg", "pool5.svg"
IMAGES = 60_000

Records = Mapping[Key, Record]

# The curves of both panels: the method here, and the published errors.
_CURVES = (
    ("gradual warmup", papers.GRADUAL_WARMUP),
    ("no warmup", papers.NO_WARMUP),
    ("constant warmup", papers.CONSTANT_WARMUP),
    ("square-root rate", papers.SQUARE_ROOT_RATE),
    ("fixed rate", papers.FIXED_RATE),
    ("LARS", papers.LARS),
    ("SGD, tuned", {}),
)


def write_report(records: Records, directory: pathlib.Path, pages: pathlib.Path) -> None:
    """Writes the plots into ``directory`` and the page with its tables into ``pages``.

    Raises:
      UserError: if they cannot be written, or the page lacks a table's marks.
    """
    write_results(
        directory,
        {SCALING_PICTURE: scaling_picture(records), POOL5_PICTURE: pool5_picture(records)},
    )
    page.rewrite(PAGE, lambda text: filled_page(text, records), pages)


def filled_page(text: str, records: Records) -> str:
    """Returns the page with its tables."""
    parts = {
        experiment.name: tables.error_table(
            experiment,
            records,
            lambda setting: (setting.batch, IMAGES // setting.batch),
            ["batch", "updates an epoch"],
        )
        for experiment in EXPERIMENTS
    }
    parts["half_precision"] = _half_precision_table(half_precision(), records)
    return page.fill(text, parts)


def _half_precision_table(experiment: Experiment, records: Records) -> str:
    rows = []
    for setting in experiment.settings:
        lost = [r["lost"] for r in tables.of_setting(setting, records) if "lost" in r]
        fraction = f"{min(lost):.2%} to {max(lost):.2%}" if lost else ""
        rows.append([setting.method, str(tables.outcome(setting, records)), fraction])
    return tables.markdown(["batch 4096", "error, percent", "updates lost in rounding"], rows)


def scaling_picture(records: Records) -> str:
    """Returns a plot of error against updates per epoch, ours beside the papers', as SVG."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharex=True)
        for (method, published), color in zip(_CURVES, COLORS):
            ours = {
                IMAGES / setting.batch: tables.outcome(setting, records)
                for setting in scaling().settings
                if setting.method == method
            }
            plot_errors(left, ours, method, color)
            if published:
                right.plot(
                    [papers.IMAGES / batch for batch in published],
                    list(published.values()),
                    label=method,
                    color=color,
                    marker="o",
                )
        left.set_title("here: Fashion-MNIST, 5 epochs")
        right.set_title("published: ImageNet, 90 epochs")
        left.invert_xaxis()
        for axes in (left, right):
            _updates_axis(axes)
            axes.set_ylabel("top-1 error, percent")
            axes.legend(frameon=False)

    return drawn(draw, (10, 4.4))


def _updates_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("updates an epoch (to the right: larger batches)")


def pool5_picture(records: Records) -> str:
    """Returns a plot of the distribution of fc6's input features over steps as SVG."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, setting, color in zip(panels, pool5().settings, COLORS):
            for record in tables.of_setting(setting, records)[:1]:
                rows = record["features"]
                steps = [row["step"] for row in rows]
                low, high = [row["p1"] for row in rows], [row["p99"] for row in rows]
                axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
                axes.plot(steps, [row["p50"] for row in rows], color=color)
            axes.set_title(setting.method)
            axes.set_xlabel("step")
        panels[0].set_ylabel("1st, 50th and 99th percentile of the features")

    return drawn(draw, (8, 3.4))
