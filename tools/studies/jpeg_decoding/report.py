"""Generates the table of docs/input_pipeline.md and a plot from the log."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure
from study import page, tables
from study.log import Key, Record
from study.settings import Experiment
from study.style import COLORS, drawn

from imagenet_fast.base.files import write_results
from imagenet_fast.lab.benchmarks.decode import VARIANTS
from jpeg_decoding.experiments import EXPERIMENTS

PAGE, PART, PICTURE = "input_pipeline.md", "jpeg_decoding", "options.svg"

Records = Mapping[Key, Record]


def write_report(records: Records, directory: pathlib.Path, pages: pathlib.Path) -> None:
    """Writes the plot into ``directory`` and the page with its table into ``pages``.

    Raises:
      UserError: if they cannot be written, or the page lacks the table's marks.
    """
    write_results(directory, {PICTURE: drawn(lambda figure: _draw(figure, records), (7, 2.8))})
    page.rewrite(PAGE, lambda text: filled_page(text, records), pages)


def filled_page(text: str, records: Records) -> str:
    """Returns the page with its table."""
    columns = [column for drawing in EXPERIMENTS for column in _columns(drawing, records)]
    heading = ["decoding"]
    for drawing in EXPERIMENTS:
        heading += [f"in {drawing.name}: levels off", "error, percent"]
    rows = [list(row) for row in zip(VARIANTS, *columns)]
    return page.fill(text, {PART: tables.markdown(heading, rows)})


def _columns(drawing: Experiment, records: Records) -> tuple[list[str], list[str]]:
    """Returns the pixels' differences and the errors of each variant."""
    differences, errors = [], []
    for setting in drawing.settings:
        found = tables.of_setting(setting, records)
        differences.append(f"{found[0]['difference']:.1f}" if found else "")
        errors.append(str(tables.outcome(setting, records)))
    return differences, errors


def _draw(figure: Figure, records: Records) -> None:
    """Draws each run's error, and the mean of each setting."""
    panels = figure.subplots(1, len(EXPERIMENTS), sharex=True, sharey=True)
    for axes, drawing, color in zip(panels, EXPERIMENTS, COLORS):
        for place, setting in enumerate(drawing.settings):
            errors = [100 * error for error in tables.outcome(setting, records).errors]
            if errors:
                axes.plot(errors, [place] * len(errors), "o", color=color, alpha=0.5)
                axes.plot(sum(errors) / len(errors), place, "|", color=color, markersize=20)
        axes.margins(y=0.1)
        axes.set_yticks(range(len(VARIANTS)), VARIANTS)
        axes.set_title(f"in {drawing.name}")
        axes.set_xlabel("top-1 error, percent")
    panels[0].invert_yaxis()
