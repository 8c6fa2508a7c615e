"""Generates the tables and plots of docs/bag_of_tricks.md from the log."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import page, step_times, tables
from study.log import Key, Record
from study.settings import Experiment, Setting
from study.style import COLORS, drawn, plot_accuracies

from bag_of_tricks.experiments import (
    EPOCHS,
    FULL,
    STEPS,
    ablation,
    fewer_epochs,
    frozen_scale,
    ladder,
    precisions,
    recipes,
    timed,
)
from imagenet_fast.base.files import write_results
from imagenet_fast.config import Config

PAGE = "bag_of_tricks.md"
_PUBLISHED_EPOCHS, _PUBLISHED_SECONDS = 24, 75

# Seconds of an epoch.
StepTimes = Mapping[Config, float]


def write_report(
    records: Mapping[Key, Record], directory: pathlib.Path, pages: pathlib.Path
) -> None:
    """Writes the plots into ``directory`` and the page with its tables into ``pages``.

    Raises:
      UserError: if they cannot be written, or the page lacks a table's marks.
    """
    pictures = {
        "epochs.svg": drawn(lambda figure: _draw_epochs(figure, records), (6, 4)),
        "tricks.svg": drawn(lambda figure: _draw_tricks(figure, records), (9, 4)),
    }
    write_results(directory, pictures)
    times = read_step_times(directory)
    page.rewrite(PAGE, lambda text: filled_page(text, records, times), pages)


def read_step_times(directory: pathlib.Path) -> StepTimes:
    """Returns the measurements of ``step_times.py``; empty if there are none."""
    measured = step_times.read(directory)
    return {config: measured[name] for name, config in timed().items() if name in measured}


def filled_page(text: str, records: Mapping[Key, Record], times: StepTimes) -> str:
    """Returns the page with its tables."""
    parts = {
        "ladder": _ladder_table(records, times),
        "epochs": _epochs_table(records, times),
        "ablation": _one_less_table(ablation(), records, _taken_away),
        "frozen_scale": _one_less_table(frozen_scale(), records, lambda part: f"with `--{part}`"),
        "precisions": _precisions_table(records, times),
    }
    return page.fill(text, parts)


def _seconds(epochs: int, time: float | None) -> str:
    return "" if time is None else f"{epochs * time:.0f}"


def _ladder_table(records: Mapping[Key, Record], times: StepTimes) -> str:
    rows = []
    for step, setting in zip(STEPS, ladder().settings):
        published = "" if step.seconds is None else f"{step.seconds:g}"
        seconds = _seconds(step.epochs, times.get(setting.config))
        rows.append(
            [
                step.name,
                str(step.epochs),
                tables.outcome(setting, records).accuracy,
                seconds,
                published,
            ]
        )
    heading = ["with all before it", "epochs", "accuracy", "seconds", "published, to 94%: seconds"]
    return tables.markdown(heading, rows)


def _epochs_table(records: Mapping[Key, Record], times: StepTimes) -> str:
    first, last = STEPS[0], STEPS[-1]
    rows = []
    for width in EPOCHS:
        settings = fewer_epochs(width).settings
        base_time = times.get(settings[0].config)
        for setting in settings:
            epochs = int(setting.config.duration.amount)
            # Seconds of an epoch do not depend on the number of epochs.
            recipe = recipes().get(setting.method)
            seconds = times.get(recipe.replace(width=width)) if recipe else base_time
            fraction = ""
            if seconds is not None and base_time is not None:
                fraction = f"{epochs * seconds / (first.epochs * base_time):.2f}"
            rows.append(
                [
                    setting.method,
                    str(width),
                    str(epochs),
                    tables.outcome(setting, records).accuracy,
                    f"{epochs / first.epochs:.2f}",
                    _seconds(epochs, seconds),
                    fraction,
                ]
            )
    rows.append(
        [
            f"{FULL}, published",
            "64",
            str(last.epochs),
            "94.1 on CIFAR-10",
            f"{last.epochs / _PUBLISHED_EPOCHS:.2f}",
            f"{last.seconds:g}",
            f"{last.seconds / _PUBLISHED_SECONDS:.2f}",
        ]
    )
    heading = ["", "channels", "epochs", "accuracy", "of the baseline's"]
    heading += ["seconds", "of the baseline's"]
    return tables.markdown(heading, rows)


def _one_less_table(
    experiment: Experiment, records: Mapping[Key, Record], name_of: Callable[[str], str]
) -> str:
    """Returns a table of all tricks, and of all without one."""
    whole = tables.outcome(experiment.settings[0], records)
    rows = []
    for setting in experiment.settings:
        found = tables.outcome(setting, records)
        name = setting.method if setting.method == FULL else name_of(setting.method)
        difference = ""
        if setting.method != FULL and found.errors and whole.errors:
            difference = f"{100 * (whole.mean - found.mean):+.2f}"
        rows.append([name, found.accuracy, difference])
    return tables.markdown(["", "accuracy", "difference"], rows)


def _taken_away(trick: str) -> str:
    kept = trick.removeprefix("no ")
    return f"without {trick}" if kept == trick else f"with {kept}"


def _precisions_table(records: Mapping[Key, Record], times: StepTimes) -> str:
    rows = []
    for setting in precisions().settings:
        seconds = [_seconds(1, times.get(setting.config.replace(width=width))) for width in EPOCHS]
        rows.append([setting.method, tables.outcome(setting, records).accuracy, *seconds])
    heading = ["all tricks, 10 epochs", "accuracy"]
    heading += [f"seconds an epoch, {width} channels" for width in EPOCHS]
    return tables.markdown(heading, rows)


def _draw_epochs(figure: Figure, records: Mapping[Key, Record]) -> None:
    """Accuracies against epochs."""
    axes = figure.subplots()
    for place, width in enumerate(EPOCHS):
        baseline, *others = fewer_epochs(width).settings
        for name, line in zip(EPOCHS[width], ("o-", "s:")):
            shown = [setting for setting in others if setting.method == name]
            _draw_points(axes, shown, records, COLORS[place], line, f"{name}, {width} channels")
        found = tables.outcome(baseline, records)
        if found.errors:
            height = 100 * (1 - found.mean)
            label = f"{STEPS[0].name}, {STEPS[0].epochs} epochs, {width} channels"
            axes.axhline(height, color=COLORS[place], linestyle="--", label=label)
    axes.legend(frameon=False, loc="lower right")
    axes.set_xlabel("epochs")
    axes.set_ylabel("top-1 accuracy, percent")


def _draw_tricks(figure: Figure, records: Mapping[Key, Record]) -> None:
    """The accuracies of one trick after another, and of all tricks but one."""
    left, right = figure.subplots(1, 2)
    steps = {
        f"{step.name}, {step.epochs} epochs": setting
        for step, setting in zip(STEPS, ladder().settings)
    }
    plot_accuracies(left, _outcomes(steps, records), COLORS[0])
    left.set_title("one trick after another")
    first, *others = ablation().settings
    rows = {FULL: first, **{_taken_away(setting.method): setting for setting in others}}
    plot_accuracies(right, _outcomes(rows, records), COLORS[1])
    right.set_title(f"all tricks but one, {STEPS[-1].epochs} epochs")


def _outcomes(
    rows: Mapping[str, Setting], records: Mapping[Key, Record]
) -> dict[str, tables.Outcome]:
    return {name: tables.outcome(setting, records) for name, setting in rows.items()}


def _draw_points(
    axes: Axes,
    settings: Sequence[Setting],
    records: Mapping[Key, Record],
    color: str,
    line: str,
    label: str,
) -> None:
    """Draws mean and standard deviation of each setting that has been run."""
    found = {
        setting.config.duration.amount: tables.outcome(setting, records) for setting in settings
    }
    found = {epochs: outcome for epochs, outcome in found.items() if outcome.errors}
    if not found:  # A legend would show it.
        return
    axes.errorbar(
        list(found),
        [100 * (1 - outcome.mean) for outcome in found.values()],
        [100 * outcome.deviation for outcome in found.values()],
        fmt=line,
        label=label,
        color=color,
        capsize=3,
    )
