"""``report.html``: a run on one self-contained page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.files import write_file
from imagenet_fast.base.html_page import document, header, section, table, tile_row
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import to_path
from imagenet_fast.config import Config, option_names
from imagenet_fast.training.metrics_file import read_rows
from imagenet_fast.training.report import page_images
from imagenet_fast.training.report.charts import LEARNING_RATE, Chart, Curve, Row, is_number
from imagenet_fast.training.report.error_analysis import ErrorAnalysis
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.report.saved_images import load_error_analysis, load_inputs

FILE = "report.html"

# So many evaluations are shown without a click.
_FEW_EVALUATIONS = 6
_MISSING = "\u2013"


def write_report(config: Config, summary: dict[str, Any], labels: Sequence[str]) -> None:
    """Writes ``report.html`` from the files of ``model_dir``.

    Args:
      config: the run's options.
      summary: the run's results, as in ``summary.json``.
      labels: the name of each class.
    """
    directory = config.model_dir
    text = render(
        summary,
        read_rows(directory),
        config,
        labels,
        load_inputs(directory),
        load_error_analysis(directory),
    )
    write_file(to_path(directory, FILE), text)


def render(
    summary: dict[str, Any],
    rows: list[Row],
    config: Config,
    labels: Sequence[str] = (),
    inputs: InputImages | None = None,
    analysis: ErrorAnalysis | None = None,
) -> str:
    """Returns the report of a run as an HTML page without scripts or links to other files.

    What is missing (a run without validation data, or stopped before the first row) is left out.

    Args:
      summary: the run's numbers, as in ``summary.json``; any of them may be None.
      rows: the rows of ``metrics.jsonl``, in order.
      config: the run's options.
      labels: the name of each class, if there is an image to be shown.
      inputs: training images as the model sees them.
      analysis: what the model gets wrong.
    """
    name = f"{config.model} on {_data_name(config)}"
    top1 = summary.get("top1")
    title = f"{_percent(top1)} top-1: {name}" if is_number(top1) else name
    body = [
        header(name, _subtitle(summary, config)),
        _tiles(summary),
        f'<div class="cards">{"".join(_charts(summary, rows))}</div>',
        '<div class="cards">',
        section(
            "Time and images",
            _time_bar(summary) + table(_times(summary) + _images(summary)),
        ),
        section("Hardware and versions", table(_environment(summary))),
        "</div>",
        _evaluations(rows),
        _mistakes(analysis, labels),
        _inputs(inputs, labels),
        _bad_images(summary),
        _damaged_checkpoints(summary),
        section("Command", f"<pre>{html.escape(summary.get('command') or _MISSING)}</pre>"),
        section("Options", _options(config)),
    ]
    return document(title, body, page_images.STYLE)


# What the page says.


def _data_name(config: Config) -> str:
    return "synthetic images" if config.synthetic else to_path(config.data_dir).name or "data"


def _subtitle(summary: dict[str, Any], config: Config) -> str:
    parts = [
        _epochs(summary, config),
        _count(summary.get("steps"), "step"),
        f"batch {config.batch_size:,}",
        summary.get("runs_on") or _count(summary.get("replicas"), "replica"),
        config.precision,
    ]
    finished = str(summary.get("finished") or "")
    if finished:
        parts.append(f"finished {finished.replace('T', ' ').replace('+00:00', ' UTC')}")
    return " · ".join(parts)


def _epochs(summary: dict[str, Any], config: Config) -> str:
    """Tells the run's length, and that it was to be longer where it ended before."""
    done, planned = summary.get("epochs"), config.duration
    if not is_number(done):
        return f"{_MISSING} epochs"
    if planned.unit == "epochs" and done < 0.999 * planned.amount:
        return f"{done:.3g} of {planned}"
    return str(Duration(float(f"{done:.4g}"), "epochs"))


def _tiles(summary: dict[str, Any]) -> str:
    """The result at a glance."""
    if is_number(summary.get("top1")):
        images = _count(summary.get("images_evaluated"), "image")
        loss = f"validation loss {_number(summary.get('loss'))}"
        tiles = [
            ("Top-1 accuracy", _percent(summary["top1"]), f"on {images}"),
            ("Top-5 accuracy", _percent(summary.get("top5")), loss),
        ]
    else:
        tiles = [("Training loss", _number(summary.get("train_loss")), "no evaluation in this run")]
    train, wall = (_seconds(summary.get(f"{name}_seconds")) for name in ("train", "wall"))
    target = summary.get("target_top1")
    if not is_number(target):
        tiles.append(("Training time", train, f"{wall} in all"))
    elif not is_number(summary.get("train_seconds_to_target")):
        tiles.append((f"Time to {_target(target)}", "not reached", f"in {train} of training"))
    else:
        time, wall = (
            _seconds(summary.get(f"{name}_seconds_to_target")) for name in ("train", "wall")
        )
        tiles.append((f"Time to {_target(target)}", time, f"of training; {wall} in all"))
    tiles.append(
        (
            "Images per second",
            _number(summary.get("images_per_second")),
            f"{_number(summary.get('images_per_second_per_device'))} per device",
        )
    )
    return tile_row(tiles)


def _times(summary: dict[str, Any]) -> list[tuple[str, str]]:
    times = [
        ("Training", _seconds(summary.get("train_seconds"))),
        ("Start and compilation", _seconds(summary.get("compile_seconds"))),
        ("In all", _seconds(summary.get("wall_seconds"))),
        ("Images per second", _number(summary.get("images_per_second"))),
        ("Images per second per device", _number(summary.get("images_per_second_per_device"))),
    ]
    if is_number(summary.get("target_top1")):
        target = _target(summary["target_top1"])
        times += [
            (f"Training to {target} top-1", _seconds(summary.get("train_seconds_to_target"))),
            (f"In all to {target} top-1", _seconds(summary.get("wall_seconds_to_target"))),
        ]
    return times


def _time_bar(summary: dict[str, Any]) -> str:
    """A bar that shows where the time went."""
    train, compiling, wall = (
        summary.get(f"{name}_seconds") for name in ("train", "compile", "wall")
    )
    if not (is_number(train) and is_number(compiling) and is_number(wall) and wall > 0):
        return ""
    parts = {
        "training": train,
        "start and compilation": compiling,
        "evaluation and saving": max(wall - train - compiling, 0.0),
    }
    colors = ("speed", "compile", "other")
    total = sum(parts.values())
    bar = "".join(
        f'<i style="width:{100 * seconds / total:.2f}%;background:var(--{color})"></i>'
        for color, seconds in zip(colors, parts.values())
    )
    keys = "".join(
        f'<span><i style="background:var(--{color})"></i>{name} {seconds / total:.0%}</span>'
        for color, (name, seconds) in zip(colors, parts.items())
    )
    return f'<div class="bar">{bar}</div><p class="keys">{keys}</p>'


def _evaluations(rows: list[Row]) -> str:
    """All evaluations, newest first, folded if they are many."""
    evaluations = [row for row in rows if row.get("kind") == "validation"]
    if not evaluations:
        return ""
    head = "".join(
        f"<th>{name}</th>" for name in ("Epoch", "Top-1", "Top-5", "Loss", "Training time")
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(text)}</td>"
            for text in (
                _number(row.get("epoch")),
                _percent(row.get("top1")),
                _percent(row.get("top5")),
                _number(row.get("loss")),
                _seconds(row.get("train_seconds")),
            )
        )
        + "</tr>"
        for row in reversed(evaluations)
    )
    return section(
        "Evaluations",
        f"<details{' open' * (len(evaluations) <= _FEW_EVALUATIONS)}>"
        f"<summary>{_count(len(evaluations), 'evaluation')}, the last one first</summary>"
        f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</details>",
    )


def _mistakes(analysis: ErrorAnalysis | None, labels: Sequence[str]) -> str:
    """Confused classes, and the images of which the model was most wrong."""
    if analysis is None:
        return ""
    parts = [
        '<div class="cards">',
        section("Confusion matrix", page_images.confusion_matrix(analysis, labels)),
        section("Most confused classes", page_images.confused_pairs(analysis, labels)),
        "</div>",
    ]
    if len(analysis.images):
        content = page_images.worst_mistakes(analysis, labels)
        parts.append(section("Worst mistakes", content))
    return "\n".join(parts)


def _inputs(inputs: InputImages | None, labels: Sequence[str]) -> str:
    if inputs is None or not len(inputs.images):
        return ""
    content = page_images.input_images(inputs, labels)
    return section("Training images as the model sees them", content)


def _images(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (label, f"{summary[name]:,.0f}" if is_number(summary.get(name)) else _MISSING)
        for label, name in (
            ("Images evaluated", "images_evaluated"),
            ("Unreadable in training", "images_skipped_in_training"),
            ("Unreadable in evaluation", "images_skipped_in_evaluation"),
        )
    ]


def _bad_images(summary: dict[str, Any]) -> str:
    """What was wrong with images that could not be read, if there are any."""
    kinds = summary.get("bad_images") or {}
    if not kinds:
        return ""
    total = ("all, as listed in bad_images.jsonl", _number(sum(kinds.values())))
    lines = [(kind, _number(number)) for kind, number in kinds.items()]
    return section("Unreadable images", table([*lines, total]))


def _damaged_checkpoints(summary: dict[str, Any]) -> str:
    """Which checkpoints were set aside, if any."""
    lines = [
        (
            f"step {_number(own['step'])}",
            f"{own['reason']}; from step {_number(own['resumed_from'])}",
        )
        for own in summary.get("damaged_checkpoints") or []
    ]
    return section("Damaged checkpoints, set aside", table(lines)) if lines else ""


def _environment(summary: dict[str, Any]) -> list[tuple[str, str]]:
    parameters, hardware = summary.get("parameters"), summary.get("hardware") or {}
    return [
        ("Devices", summary.get("runs_on") or ", ".join(summary.get("devices") or [_MISSING])),
        ("Replicas", _number(summary.get("replicas"))),
        ("GPUs of the chief", ", ".join(hardware.get("gpus") or ["none"])),
        ("Processor of the chief", hardware.get("cpu") or _MISSING),
        ("Cores of the chief", _number(hardware.get("cores"))),
        ("Trainable parameters", f"{parameters:,}" if is_number(parameters) else _MISSING),
        *((name, str(version)) for name, version in (summary.get("versions") or {}).items()),
    ]


def _options(config: Config) -> str:
    """The options that make this run what it is, then, folded, the others."""
    default = Config()
    changed = config.differences(default)
    others = [name for name in option_names() if name not in changed]
    return (
        table(
            (
                name,
                option_text(getattr(config, name)),
                f"default: {option_text(getattr(default, name)) or 'none'}",
            )
            for name in changed
        )
        + f"<details><summary>{_count(len(others), 'option')} left at the default</summary>"
        + table((name, option_text(getattr(config, name)) or "none") for name in others)
        + "</details>"
    )


# How it is written.


def _percent(value: Any) -> str:
    return f"{value:.2%}" if is_number(value) else _MISSING


def _target(value: Any) -> str:
    """Writes a percentage as briefly as the user did."""
    return f"{100 * value:.6g}%" if is_number(value) else _MISSING


def _number(value: Any) -> str:
    """Writes whole numbers and those from 1000 on in full, others with four digits."""
    if not is_number(value):
        return _MISSING
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _count(value: Any, noun: str) -> str:
    return f"{_number(value)} {noun}{'' if value == 1 else 's'}"


def _seconds(value: Any) -> str:
    """Writes a length of time with its two largest units."""
    if not is_number(value):
        return _MISSING
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


# The curves.


def _charts(summary: dict[str, Any], rows: list[Row]) -> list[str]:
    target, speed = summary.get("target_top1"), summary.get("images_per_second")
    has_speed = is_number(speed) and speed > 0
    # Rows of steps that were not timed, as each process' first one, have no speed.
    timed = [row for row in rows if row.get("images_per_second") != 0]
    accuracy = Chart(
        "Accuracy",
        (
            Curve("", "validation", "top5", "validation", dashed=True),
            Curve("top-5", "train", "top5", "train", dashed=True, noisy=True),
            Curve("train", "train", "top1", "train", noisy=True),
            Curve("validation", "validation", "top1", "validation"),
        ),
        percent=True,
        level=target if is_number(target) else None,
        level_label=f"target {_target(target)}",
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
        level_label=f"mean {_number(speed)}",
    )
    return [
        accuracy.render(rows),
        loss.render(rows),
        LEARNING_RATE.render(rows),
        throughput.render(timed),
    ]
