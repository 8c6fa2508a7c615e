"""Generates the table and the plot of docs/batch_norm_groups.md from the log."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure
from study import page, tables
from study.log import Key, Record
from study.style import COLORS, drawn, plot_errors

from batch_norm_groups.experiments import (
    EXPERIMENTS,
    GROUPS,
    MICRO_BATCHES,
    groups,
    normalization_batch,
)
from imagenet_fast.base.files import write_results

PAGE, PICTURE = "batch_norm_groups.md", "groups.svg"


def write_report(
    records: Mapping[Key, Record], directory: pathlib.Path, pages: pathlib.Path
) -> None:
    """Writes the plot into ``directory`` and the page with its table into ``pages``.

    Raises:
      UserError: if they cannot be written, or the page lacks the table's marks.
    """
    write_results(directory, {PICTURE: drawn(lambda figure: _draw(figure, records), (6, 4))})
    page.rewrite(PAGE, lambda text: filled_page(text, records), pages)


def filled_page(text: str, records: Mapping[Key, Record]) -> str:
    """Returns the page with its table."""
    (experiment,) = EXPERIMENTS
    table = tables.error_table(
        experiment,
        records,
        lambda setting: (normalization_batch(setting),),
        ["images that are normalized together"],
    )
    return page.fill(text, {experiment.name: table})


def _draw(figure: Figure, records: Mapping[Key, Record]) -> None:
    """Draws the error against the normalization batch."""
    axes = figure.add_subplot()
    for method, color in zip((GROUPS, MICRO_BATCHES), COLORS):
        outcomes = {
            normalization_batch(setting): tables.outcome(setting, records)
            for setting in groups().settings
            if setting.method == method
        }
        plot_errors(axes, outcomes, method, color)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("images that are normalized together")
    axes.set_ylabel("top-1 error, percent")
    axes.legend(frameon=False)
