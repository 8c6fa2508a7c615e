"""``report.html``: a run on one self-contained page."""

from __future__ import annotations

import html
import itertools
import shlex
from collections.abc import Sequence
from typing import Any

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.files import write_file
from imagenet_fast.base.html_page import document, header, section, table, tile_row
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import to_path
from imagenet_fast.config import Config, option_names
from imagenet_fast.recipes import find_recipe, read_header
from imagenet_fast.training.checkpoints.thresholds import Thresholds, read_thresholds
from imagenet_fast.training.logs.metrics_file import Row, read_rows
from imagenet_fast.training.options import METRICS, metric_of
from imagenet_fast.training.report import formats, page_images
from imagenet_fast.training.report.charts import run_charts, target_of
from imagenet_fast.training.report.class_metrics import class_metrics, mean_metrics
from imagenet_fast.training.report.formats import MISSING, is_number
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.report.saved_images import load_error_analysis, load_inputs
from imagenet_fast.training.segments import lines_of
from imagenet_fast.training.step.calibration import accuracy_interval
from imagenet_fast.training.step.error_analysis import ErrorAnalysis

FILE = "report.html"

# With at most this many classes, top-5 accuracy says nothing.
_FEW_CLASSES = 5
# With at most this many evaluations, their table is unfolded.
_FEW_EVALUATIONS = 6
_DEVICE_COLORS = ("speed", "compile", "other", "validation", "rate", "train")
# Up to this ratio, the numbers of images of classes count as equal.
_EQUAL = 1.5


def write_report(config: Config, summary: dict[str, Any], labels: Sequence[str]) -> None:
    """Writes ``report.html`` from the files of ``model_dir``."""
    directory = config.model_dir
    text = render(
        summary,
        read_rows(directory),
        config,
        labels,
        load_inputs(directory, len(labels)),
        load_error_analysis(directory, len(labels)),
        read_thresholds(directory).get("last"),
    )
    write_file(to_path(directory, FILE), text)


def render(
    summary: dict[str, Any],
    rows: list[Row],
    config: Config,
    labels: Sequence[str] = (),
    inputs: InputImages | None = None,
    analysis: ErrorAnalysis | None = None,
    thresholds: Thresholds | None = None,
) -> str:
    """Returns the report of a run as an HTML page without scripts or links to other files.

    Parts without data are left out, as of a run without validation data.

    Any number of the summary may be None.
    """
    data = summary.get("data")
    if not data:
        data = "synthetic images" if config.synthetic else to_path(config.data_dir).name or "data"
    name = f"{config.model} on {data}"
    has_top5 = not 0 < len(labels) <= _FEW_CLASSES
    main = metric_of(summary)
    value = summary.get(main)
    title = f"{formats.percent(value)} {METRICS[main]}: {name}" if is_number(value) else name
    body = [
        header(name, _subtitle(summary, config)),
        _tiles(
            summary,
            has_top5,
            config.loss.replace("cross_", "cross-").replace("_", " "),
            _mean_recall(analysis, labels),
        ),
        _expected(summary),
        f'<div class="cards">{"".join(run_charts(summary, rows, has_top5))}</div>',
        '<div class="cards">',
        section("Time and images", _time_bar(summary) + table(_times(summary))),
        section("Hardware and versions", table(_environment(summary))),
        "</div>",
        _segments(summary),
        _evaluations(rows, has_top5),
        _mistakes(analysis, labels),
        _several_labels(thresholds),
        _inputs(inputs, labels),
        _bad_images(summary),
        _damaged_checkpoints(summary),
        section("Command", f"<pre>{html.escape(summary.get('command') or MISSING)}</pre>"),
        section("Options", _options(config)),
    ]
    return document(title, body, page_images.STYLE)


def _subtitle(summary: dict[str, Any], config: Config) -> str:
    parts = [
        _epochs(summary, config.duration) + (", stopped early" if summary.get("stopped") else ""),
        formats.count(summary.get("steps"), "step"),
        f"batch {config.batch_size:,}",
        summary.get("runs_on") or formats.count(summary.get("replicas"), "replica"),
        config.precision,
    ]
    finished = str(summary.get("finished") or "")
    if finished:
        parts.append(f"finished {finished.replace('T', ' ').replace('+00:00', ' UTC')}")
    return " · ".join(parts)


def _epochs(summary: dict[str, Any], planned: Duration) -> str:
    """Returns the run's length and, if it ended early, its planned length."""
    done = summary.get("epochs")
    if not is_number(done):
        return f"{MISSING} epochs"
    if planned.unit == "epochs" and done < 0.999 * planned.amount:
        return f"{done:.3g} of {planned}"
    return str(Duration(float(f"{done:.4g}"), "epochs"))


def _expected(summary: dict[str, Any]) -> str:
    """Returns what the recipes in the command say about their result; empty: no recipes."""
    try:
        arguments = shlex.split(summary.get("command") or "")
    except ValueError:  # not the command line of a shell
        return ""
    files = [text.partition("=")[2] for text in arguments if text.startswith("--flagfile=")]
    lines = []
    models = [text for text in arguments if text.startswith("--model=")]
    for recipe in filter(None, map(find_recipe, files)):
        if models and models[-1] != f"--model={Config.from_flagfile(recipe).model}":
            continue  # The recipe's accuracy is its network's.
        header = read_header(recipe)
        lines += [
            (f"{name} with {header.name}", text)
            for name, text in (("Expected", header.expected), ("Measured", header.measured))
            if text
        ]
    reached = ("Reached here", f"{formats.percent(summary.get('top1'))} top-1")
    return section("Expected accuracy", table([reached, *lines])) if lines else ""


def _mean_recall(analysis: ErrorAnalysis | None, labels: Sequence[str]) -> float | None:
    """Returns the mean of the classes' recalls if their numbers of images are unequal."""
    if analysis is None:
        return None
    metrics = class_metrics(analysis.confusion, labels)
    counts = [row.images for row in metrics if row.images]
    if max(counts, default=0) <= _EQUAL * min(counts, default=0):
        return None
    return mean_metrics(metrics).recall


def _tiles(
    summary: dict[str, Any], has_top5: bool, loss_name: str, mean_recall: float | None
) -> str:
    """Returns the main results."""
    main, percent = metric_of(summary), formats.percent
    if is_number(summary.get(main)):
        images = formats.count(summary.get("images_evaluated"), "image")
        best, better = summary.get(f"best_{main}"), ""
        if is_number(best) and best > summary[main]:
            better = f"; best {percent(best)} at step {summary.get('best_step')}"
        title = "Top-1 accuracy" if main == "top1" else "Mean average precision"
        note = f"{_interval(summary, main)}on {images}{better}"
        tiles = [(title, percent(summary[main]), note)]
        if mean_recall is not None:
            note = "classes have unequal numbers of images"
            tiles.append(("Mean of recalls", percent(mean_recall), note))
        loss = formats.number(summary.get("loss"))
        if main == "map":
            note = f"macro F1 {percent(summary.get('f1_macro'))}; validation loss {loss}"
            tiles.append(("Micro F1", percent(summary.get("f1_micro")), note))
        elif has_top5:
            note = f"{_interval(summary, 'top5')}validation loss {loss}"
            tiles.append(("Top-5 accuracy", percent(summary.get("top5")), note))
        else:
            tiles.append(("Validation loss", loss, loss_name))
    else:
        loss = formats.number(summary.get("train_loss"))
        tiles = [("Training loss", loss, "no evaluation in this run")]
    train, wall, train_to_target, wall_to_target = (
        formats.seconds(summary.get(f"{name}_seconds{until}"))
        for until in ("", "_to_target")
        for name in ("train", "wall")
    )
    target = target_of(summary)
    name = f"Time to {formats.target(target)}"
    if not is_number(target):
        tiles.append(("Training time", train, f"{wall} in all"))
    elif train_to_target == MISSING:
        tiles.append((name, "not reached", f"in {train} of training"))
    else:
        tiles.append((name, train_to_target, f"of training; {wall_to_target} in all"))
    speed, note = (
        formats.number(summary.get(f"images_per_second{each}")) for each in ("", "_per_device")
    )
    return tile_row([*tiles, ("Images per second", speed, f"{note} per device")])


def _interval(summary: dict[str, Any], name: str) -> str:
    bounds = formats.interval(summary.get(f"{name}_interval"))
    return f"95% interval {bounds}; " if bounds else ""


def _times(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("Training", formats.seconds, "train_seconds"),
        ("Start and compilation", formats.seconds, "compile_seconds"),
        ("In all", formats.seconds, "wall_seconds"),
        ("Images per second", formats.number, "images_per_second"),
        ("Images per second per device", formats.number, "images_per_second_per_device"),
    ]
    if is_number(target_of(summary)):
        target = f"{formats.target(target_of(summary))} {METRICS[metric_of(summary)]}"
        rows += [
            (f"Training to {target}", formats.seconds, "train_seconds_to_target"),
            (f"In all to {target}", formats.seconds, "wall_seconds_to_target"),
        ]
    rows += [
        ("Images evaluated", formats.whole, "images_evaluated"),
        ("Unreadable in training", formats.whole, "images_skipped_in_training"),
        ("Unreadable in evaluation", formats.whole, "images_skipped_in_evaluation"),
    ]
    return [(label, shown(summary.get(name))) for label, shown, name in rows]


def _time_bar(summary: dict[str, Any]) -> str:
    """Returns a bar that shows how the time was spent."""
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


def _evaluations(rows: list[Row], has_top5: bool) -> str:
    """Returns all evaluations, newest first, folded if they are many."""
    evaluations = [
        {**row, "top1_interval": accuracy_interval(row.get("top1"), row.get("examples"))}
        for row in rows
        if row.get("kind") == "validation"
    ]
    if not evaluations:
        return ""
    accuracies = [
        ("Top-1", formats.percent, "top1"),
        ("95% interval", formats.interval, "top1_interval"),
        *([("Top-5", formats.percent, "top5")] if has_top5 else []),
    ]
    if "map" in evaluations[-1]:
        names = {"map": "mAP", "f1_micro": "Micro F1", "f1_macro": "Macro F1"}
        accuracies = [(text, formats.percent, name) for name, text in names.items()]
    columns = [
        ("Epoch", formats.number, "epoch"),
        *accuracies,
        ("Loss", formats.number, "loss"),
        ("Training time", formats.seconds, "train_seconds"),
    ]
    head = "".join(f"<th>{name}</th>" for name, _, _ in columns)
    lines = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(shown(row.get(key)))}</td>" for _, shown, key in columns)
        + "</tr>"
        for row in reversed(evaluations)
    )
    return section(
        "Evaluations",
        f"<details{' open' * (len(evaluations) <= _FEW_EVALUATIONS)}>"
        f"<summary>{formats.count(len(evaluations), 'evaluation')}, newest first</summary>"
        f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</details>",
    )


def _mistakes(analysis: ErrorAnalysis | None, labels: Sequence[str]) -> str:
    """Returns the confusion matrix, the classes' metrics and the worst mistakes."""
    if analysis is None:
        return ""
    calibration = ""
    if len(analysis.calibration):
        calibration = section("Reliability", page_images.reliability_diagram(analysis))
    parts = [
        '<div class="cards">',
        section("Confusion matrix", page_images.confusion_matrix(analysis, labels)),
        calibration,
        "</div>",
        section("Most confused classes", page_images.confused_pairs(analysis, labels)),
        section("Classes", page_images.class_table(analysis, labels)),
    ]
    if len(analysis.images):
        content = page_images.worst_mistakes(analysis, labels)
        parts.append(section("Worst mistakes", content))
    return "\n".join(parts)


def _several_labels(thresholds: Thresholds | None) -> str:
    """Returns the average precision and threshold of each class, lowest first."""
    if thresholds is None:
        return ""
    rows = sorted(
        (precision is None, precision or 0.0, name)
        for name, precision in thresholds.average_precisions.items()
    )
    lines = [
        (
            name,
            f"{MISSING if unknown else formats.percent(precision)}, threshold "
            f"{formats.number(thresholds.thresholds.get(name))}",
        )
        for unknown, precision, name in rows[: page_images.CLASSES]
    ]
    return section("Average precision of the classes, lowest first", table(lines))


def _inputs(inputs: InputImages | None, labels: Sequence[str]) -> str:
    if inputs is None or not len(inputs.images):
        return ""
    content = page_images.input_images(inputs, labels)
    return section("Training images as the model sees them", content)


def _bad_images(summary: dict[str, Any]) -> str:
    """Returns the errors of unreadable images, if there are any."""
    kinds = summary.get("bad_images") or {}
    if not kinds:
        return ""
    total = ("all, as listed in bad_images.jsonl", formats.number(sum(kinds.values())))
    lines = [(kind, formats.number(number)) for kind, number in kinds.items()]
    return section("Unreadable images", table([*lines, total]))


def _damaged_checkpoints(summary: dict[str, Any]) -> str:
    """Returns the checkpoints that were set aside, if any."""
    lines = []
    for checkpoint in summary.get("damaged_checkpoints") or []:
        step, resumed = (formats.whole(checkpoint[name]) for name in ("step", "resumed_from"))
        lines.append((f"step {step}", f"{checkpoint['reason']}; resumed from step {resumed}"))
    return section("Damaged checkpoints, set aside", table(lines)) if lines else ""


def _segments(summary: dict[str, Any]) -> str:
    """Returns the devices on which the run has been, drawn by steps, if they have changed."""
    passed = summary.get("segments") or []
    if len({one["runs_on"] for one in passed}) < 2:
        return ""
    devices = list(dict.fromkeys(one["runs_on"] for one in passed))
    colors = dict(zip(devices, itertools.cycle(_DEVICE_COLORS)))
    total = max(1, passed[-1]["until"])
    # What an earlier version trained is not known.
    bar = f'<i style="width:{100 * passed[0]["step"] / total:.2f}%"></i>'
    bar += "".join(
        f'<i style="width:{100 * max(0, one["until"] - one["step"]) / total:.2f}%;'
        f'background:var(--{colors[one["runs_on"]]})"></i>'
        for one in passed
    )
    keys = "".join(
        f'<span><i style="background:var(--{color})"></i>{html.escape(name)}</span>'
        for name, color in colors.items()
    )
    lines = table(
        (f"steps {steps}", f"{speed} images/s", *rest) for steps, speed, *rest in lines_of(passed)
    )
    return section(
        "Devices, by steps", f'<div class="bar">{bar}</div><p class="keys">{keys}</p>{lines}'
    )


def _environment(summary: dict[str, Any]) -> list[tuple[str, str]]:
    hardware = summary.get("hardware") or {}
    return [
        ("Devices", summary.get("runs_on") or ", ".join(summary.get("devices") or [MISSING])),
        ("Replicas", formats.number(summary.get("replicas"))),
        ("GPUs of the chief", ", ".join(hardware.get("gpus") or ["none"])),
        ("Processor of the chief", hardware.get("cpu") or MISSING),
        ("Cores of the chief", formats.number(hardware.get("cores"))),
        ("Trainable parameters", formats.whole(summary.get("parameters"))),
        *((name, str(version)) for name, version in (summary.get("versions") or {}).items()),
    ]


def _options(config: Config) -> str:
    """Returns the options that were changed, then, folded, the others."""
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
        + f"<details><summary>{formats.count(len(others), 'option')} left at the default</summary>"
        + table((name, option_text(getattr(config, name)) or "none") for name in others)
        + "</details>"
    )
