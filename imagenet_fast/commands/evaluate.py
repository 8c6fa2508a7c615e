"""``imagenet-fast evaluate``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from imagenet_fast.base.errors import UserError, nearest, require_choice
from imagenet_fast.base.paths import is_local, to_path
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.training.checkpoints.config_file import config_of_run
from imagenet_fast.training.options import (
    CHECKPOINT_CHOICES,
    CHECKPOINT_HELP,
    METRICS,
    MULTI_LABEL_METRICS,
)

_OPTIONS = (
    "model_dir",
    "model",
    "data_dir",
    "data_threads",
    "shard_by",
    "eval_batch_size",
    "eval_image_size",
    "eval_crop_fraction",
    "eval_crop",
    "max_pixels",
    "precision",
    "strategy",
    "tpu",
    "gpus",
    "logical_cpus",
    "pipeline_stages",
    "pipeline_servers",
    "pipeline_balance",
)

_SPLITS = ("validation", "test")
# In the table on the terminal.
_MAX_CLASSES = 30
_NAME_WIDTH = 32


def main(arguments: list[str]) -> int:
    """Evaluates a checkpoint of a run and prints a table or JSON."""
    flags = CommandFlags("evaluate", _OPTIONS, of_run=True)
    flags.define("checkpoint", "last", CHECKPOINT_HELP)
    flags.define("split", "validation", "images to evaluate on: validation or test")
    flags.define(
        "per_class",
        False,
        "also print recall (the accuracy of a class), precision and F1 of the classes, lowest "
        f"recall first; at most {_MAX_CLASSES}, but all in JSON",
    )
    flags.define("json", False, "print JSON")
    flags.parse(arguments)
    if flags["split"] not in _SPLITS:
        raise UserError(
            f"split is {flags['split']!r}, but must be validation or test"
            f"{nearest(flags['split'], _SPLITS)}"
        )
    require_choice("checkpoint", flags["checkpoint"], CHECKPOINT_CHOICES)

    if is_local(flags["model_dir"]):  # TensorFlow, which reads buckets, takes seconds to import.
        config_of_run(flags["model_dir"], flags.changes())
    import_tensorflow()
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.distribute.workers import is_chief
    from imagenet_fast.training.checkpoints.model_dir import read_labels
    from imagenet_fast.training.evaluate import evaluate

    # Evaluation does not use the first two, which may contradict flags; and it may run on another
    # machine than training did.
    here = {"loss_scale": 0.0, "xla": False, "strategy": "auto", "gpus": "", "logical_cpus": 0}
    if "pipeline_stages" in flags.changes():  # One on each device.
        here |= {"pipeline_schedule": "gpipe", "pipeline_stages_per_device": 1}
        here |= {"pipeline_balance": ()}
    config = config_of_run(flags["model_dir"], {**here, **flags.changes()})
    if "data_dir" not in flags.changes() and config.data_dir:
        _check_data_of_run(config.data_dir)
    result = evaluate(
        config, flags["split"], per_class=flags["per_class"], checkpoint=flags["checkpoint"]
    )
    if not is_chief(make_strategy(config)):
        return 0
    if flags["json"]:
        print(json.dumps(result))
        return 0
    print(f"checkpoint  {result['checkpoint']}")
    for name in _metrics(result, len(read_labels(config.model_dir))):
        print(f"{METRICS[name]:12}{result[name]:.2%}")
    if "thresholds_f1_micro" in result:
        micro, macro = (result[f"thresholds_f1_{kind}"] for kind in ("micro", "macro"))
        print(f"with the run's thresholds: micro F1 {micro:.2%}, macro F1 {macro:.2%}")
    print(f"loss        {result['loss']:.4f}")
    print(f"images      {result['examples']}")
    if result["skipped"]:
        print(f"unreadable  {result['skipped']}")
    if flags["per_class"]:
        print(f"\n{_table(result['classes'])}")
    return 0


def _metrics(result: dict[str, Any], classes: int) -> tuple[str, ...]:
    """Returns the names of what is shown of an evaluation, besides its loss."""
    if "map" in result:
        return MULTI_LABEL_METRICS
    return ("top1", "top5") if classes > 5 else ("top1",)  # otherwise top-5 is 100%


def _check_data_of_run(data_dir: str) -> None:
    """Checks that the data of training is found from this directory and on this machine."""
    if to_path(data_dir).exists():
        return
    relative = is_local(data_dir) and not pathlib.Path(data_dir).is_absolute()
    where = f"in {pathlib.Path.cwd()}" if relative else "here"
    raise UserError(
        f"data_dir {data_dir}, on which the run was trained, does not exist {where}: give "
        "--data_dir"
    )


def _table(classes: list[dict[str, Any]]) -> str:
    """Returns the metrics of the classes with the lowest recall, and the means over all."""
    from imagenet_fast.training.report.class_metrics import ClassMetrics, mean_metrics, worst_first

    if classes and "average_precision" in classes[0]:
        return _table_of_several(classes)
    metrics = [ClassMetrics(**row) for row in classes]
    shown, mean = worst_first(metrics)[:_MAX_CLASSES], mean_metrics(metrics)
    width = min(_NAME_WIDTH, max(len(row.name) for row in [*shown, mean]))
    lines = [f"{'class':{width}}  {'recall':>8}  {'precision':>9}  {'F1':>8}  {'images':>8}"]
    for row in [*shown, mean]:
        name = row.name if len(row.name) <= width else f"{row.name[: width - 3]}..."
        recall, precision, f1 = (
            "-" if value is None else f"{value:.2%}"
            for value in (row.recall, row.precision, row.f1)
        )
        lines.append(f"{name:{width}}  {recall:>8}  {precision:>9}  {f1:>8}  {row.images:>8}")
    if len(metrics) > len(shown):
        lines.insert(-1, f"... and {len(metrics) - len(shown)} more; --json has all")
    return "\n".join(lines)


def _table_of_several(classes: list[dict[str, Any]]) -> str:
    """Returns the metrics of the classes with the lowest average precision, of several labels."""
    rows = sorted(classes, key=lambda row: (row["average_precision"] or 2.0, row["name"]))
    width = min(_NAME_WIDTH, max(len(row["name"]) for row in rows[:_MAX_CLASSES]))
    heads = ("AP", "threshold", "recall", "precision", "F1", "images")
    lines = [f"{'class':{width}}" + "".join(f"  {head:>9}" for head in heads)]
    for row in rows[:_MAX_CLASSES]:
        values = ("average_precision", "threshold", "recall", "precision", "f1")
        texts = ["-" if row[name] is None else f"{row[name]:.2%}" for name in values]
        name = row["name"] if len(row["name"]) <= width else f"{row['name'][: width - 3]}..."
        cells = "".join(f"  {text:>9}" for text in (*texts, str(row["images"])))
        lines.append(f"{name:{width}}{cells}")
    if len(rows) > _MAX_CLASSES:
        lines.append(f"... and {len(rows) - _MAX_CLASSES} more; --json has all")
    return "\n".join(lines)
