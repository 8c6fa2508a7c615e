"""``imagenet-fast evaluate``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from imagenet_fast.base.errors import UserError, nearest, require_choice
from imagenet_fast.base.paths import is_local, to_path
from imagenet_fast.base.terminal import aligned
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.training.checkpoints.config_file import config_of_run
from imagenet_fast.training.options import (
    CHECKPOINT_CHOICES,
    CHECKPOINT_HELP,
    METRICS,
    MULTI_LABEL_METRICS,
)

_OPTIONS = (
    *("model_dir", "model", "data_dir", "data_threads", "shard_by"),
    *("eval_batch_size", "eval_image_size", "eval_crop_fraction", "eval_crop", "max_pixels"),
    *("precision", "strategy", "tpu", "gpus", "logical_cpus"),
    *("pipeline_stages", "pipeline_servers", "pipeline_balance"),
)

_SPLITS = ("validation", "test", "train")
# In the table on the terminal.
_MAX_CLASSES = 30
_NAME_WIDTH = 32


def main(arguments: list[str]) -> int:
    """Evaluates a checkpoint of a run and prints a table or JSON."""
    flags = CommandFlags("evaluate", _OPTIONS, of_run=True)
    flags.define("checkpoint", "last", CHECKPOINT_HELP)
    flags.define("split", "validation", "images to evaluate on: validation, test, or train")
    flags.define(
        "per_class",
        False,
        "also print recall (the accuracy of a class), precision and F1 of the classes, lowest "
        f"recall first; at most {_MAX_CLASSES}, but all in JSON",
    )
    flags.define(
        "predictions",
        "",
        "new file, .csv or .parquet, for each image's name, label, five best classes with their "
        "probabilities, and loss",
    )
    flags.define(
        "fit_temperature",
        False,
        "also find the temperature by which to divide logits for the smallest cross-entropy (Guo "
        "et al. 2017), and what it would change; evaluates twice",
    )
    flags.define(
        "class_map",
        "",
        "of a test set with other names of classes, or some of the classes, which then compete "
        "among themselves: JSON or CSV file from its names to the run's, or to their numbers; or "
        "same, if they are the run's names or numbers",
    )
    flags.define(
        "right_labels",
        "",
        "JSON file with the numbers of each image's right classes, any of which counts, as of "
        "ReaL: a list of lists in the order of file names, or an object by file name",
    )
    flags.define("json", False, "print JSON")
    flags.parse(arguments)
    if flags["split"] not in _SPLITS:
        raise UserError(
            f"split is {flags['split']!r}, but must be validation, test or train"
            f"{nearest(flags['split'], _SPLITS)}"
        )
    require_choice("checkpoint", flags["checkpoint"], CHECKPOINT_CHOICES)

    if is_local(flags["model_dir"]):  # TensorFlow, which reads buckets, takes seconds to import.
        config_here(flags)
    import_tensorflow()
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.distribute.workers import is_chief
    from imagenet_fast.training.checkpoints.model_dir import read_labels
    from imagenet_fast.training.evaluate import evaluate

    config = config_here(flags)
    names = ("per_class", "checkpoint", "predictions", "fit_temperature", "class_map")
    result = evaluate(
        config, flags["split"], **{name: flags[name] for name in (*names, "right_labels")}
    )
    if not is_chief(make_strategy(config)):
        return 0
    if flags["json"]:
        print(json.dumps(result))
        return 0
    print(f"checkpoint  {result['checkpoint']}")
    classes = len(read_labels(config.model_dir))
    if "competing" in result:
        print(f"classes     {result['competing']} of {classes} compete")
    for line in _lines(result, result.get("competing", classes)):
        print(line)
    if flags["per_class"]:
        print(f"\n{_table(result['classes'])}")
        if result.get("confused"):
            lines = map(
                "{label} predicted as {prediction}: {images} of {of}".format_map, result["confused"]
            )
            print("\nmost confused:", *lines, sep="\n")
    if flags["predictions"]:
        print(f"\npredictions of {result['examples']} images: {flags['predictions']}")
    return 0


def config_here(flags: CommandFlags) -> Config:
    """Returns the configuration of the run in ``--model_dir``, to evaluate it on this machine.

    Raises:
      UserError: if there is no such run, or its data is not here.
    """
    # Evaluation does not use the first two, which may contradict flags; and it may run on another
    # machine than training did.
    here = {"loss_scale": 0.0, "xla": False, "strategy": "auto", "gpus": "", "logical_cpus": 0}
    if "pipeline_stages" in flags.changes():  # One on each device.
        here |= {"pipeline_schedule": "gpipe", "pipeline_stages_per_device": 1}
        here |= {"pipeline_balance": ()}
    config = config_of_run(flags["model_dir"], {**here, **flags.changes()})
    if "data_dir" not in flags.changes() and config.data_dir:
        _check_data_of_run(config.data_dir)
    return config


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


def _lines(result: dict[str, Any], classes: int) -> Iterator[str]:
    """Yields the metrics of an evaluation, each with its name."""
    from imagenet_fast.training.report import formats

    def accuracy(name: str) -> str:
        bounds = formats.interval(result[f"{name}_interval"])
        return f"{result[name]:.2%}  95% interval {bounds}"

    if "map" in result:
        yield from (f"{METRICS[name]:12}{result[name]:.2%}" for name in MULTI_LABEL_METRICS)
    else:
        yield f"{METRICS['top1']:12}{accuracy('top1')}"
        if classes > 5:  # otherwise it is 100%
            yield f"{METRICS['top5']:12}{accuracy('top5')}"
    if "thresholds_f1_micro" in result:
        micro, macro = (result[f"thresholds_f1_{kind}"] for kind in ("micro", "macro"))
        yield f"with the run's thresholds: micro F1 {micro:.2%}, macro F1 {macro:.2%}"
    yield f"loss        {result['loss']:.4f}"
    if "ece" in result:
        yield f"ECE         {result['ece']:.2%}  expected calibration error"
    yield f"images      {result['examples']}"
    if result["skipped"]:
        yield f"unreadable  {result['skipped']}"
    if "any_label_top1" in result:
        images = result["any_label_examples"]
        yield f"any label   {accuracy('any_label_top1')}, on {images} images"
    if "temperature" in result:
        yield (
            f"temperature {result['temperature']:.4f}: cross-entropy "
            f"{result['nll_at_temperature']:.4f} instead of {result['nll']:.4f}, ECE "
            f"{result['ece_at_temperature']:.2%} instead of {result['ece']:.2%}"
        )


def _table(classes: list[dict[str, Any]]) -> str:
    """Returns the metrics of the classes with the lowest recall, and the means over all."""
    from imagenet_fast.training.report import formats
    from imagenet_fast.training.report.class_metrics import ClassMetrics, mean_metrics, worst_first

    if classes and "average_precision" in classes[0]:
        return _table_of_several(classes)
    metrics = [ClassMetrics(**row) for row in classes]
    rows = [["class", "recall", "95% interval", "precision", "F1", "images"]]
    for row in [*worst_first(metrics)[:_MAX_CLASSES], mean_metrics(metrics)]:
        bounds = formats.interval(row.recall_interval)
        rows.append([_name(row.name), _percent(row.recall), bounds, _percent(row.precision)])
        rows[-1] += [_percent(row.f1), str(row.images)]
    *lines, mean = aligned(rows)
    return "\n".join([*lines, *_more(classes), mean])


def _table_of_several(classes: list[dict[str, Any]]) -> str:
    """Returns the metrics of the classes with the lowest average precision, of several labels."""
    worst = sorted(
        classes,
        key=lambda row: (row["average_precision"] is None, row["average_precision"], row["name"]),
    )
    rows = [["class", "AP", "threshold", "recall", "precision", "F1", "images"]]
    for row in worst[:_MAX_CLASSES]:
        names = ("average_precision", "threshold", "recall", "precision", "f1")
        percents = [_percent(row[name]) for name in names]
        rows.append([_name(row["name"]), *percents, str(row["images"])])
    return "\n".join([*aligned(rows), *_more(classes)])


def _name(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _more(classes: list[dict[str, Any]]) -> list[str]:
    """Returns a line that counts the classes that a table leaves out, if it does."""
    left_out = len(classes) - _MAX_CLASSES
    return [f"... and {left_out} more; --json has all"] if left_out > 0 else []
