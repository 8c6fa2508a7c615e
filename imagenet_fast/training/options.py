"""The options of a run: its directory, evaluations, checkpoints and logs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.option import (
    BELOW_ONE,
    FRACTION,
    LASTS,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    OnlyIf,
    option,
)
from imagenet_fast.base.paths import is_local
from imagenet_fast.base.shared_options import SharedOptions

# The checkpoints of a run that can be evaluated and exported.
CHECKPOINT_CHOICES = ("last", "best")
CHECKPOINT_HELP = (
    "checkpoint of the run: last, or best, that of the evaluation with the best best_metric, of a "
    "run with --keep_best"
)
# Of an evaluation: their names in rows, and for people.
METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "loss": "loss",
    "map": "mAP",
    "f1_micro": "micro F1",
    "f1_macro": "macro F1",
}
# Those of data whose images have several labels, in place of the accuracies.
MULTI_LABEL_METRICS = ("map", "f1_micro", "f1_macro")

# No option here changes the weights.
_option = functools.partial(option, group="run", may_change_on_resume=True)


@dataclasses.dataclass(frozen=True)
class RunOptions(SharedOptions):
    """What a run does besides training, and what it writes."""

    xla: bool = _option(
        False,
        "compile with XLA: the whole step of one device, the forward and backward pass of several",
        group="hardware",
    )
    compile_cache: str = _option(
        "auto",
        "local folder that keeps XLA's programs for CPUs and its autotuner's choices for GPUs for "
        "the next run, up to 2 GiB; auto: imagenet_fast in $XDG_CACHE_HOME, by default ~/.cache; "
        "none: no cache",
        group="hardware",
        check=Check(lambda value: bool(value) and is_local(value), "be on a disk of this machine"),
        only_if=OnlyIf("xla"),
        in_files_of_runs=False,
    )
    eval_every: Duration = _option(
        Duration(1, "epochs"), "time between evaluations, as '1 epoch' or '500 steps'", check=LASTS
    )
    test_time_augmentation: str = _option(
        "none",
        "views of an image whose logits evaluation and exported models average; none: the image "
        "alone; flip: it and its mirror image; flip_and_shift: also both shifted by a pixel, up "
        "and left, and down and right, at half the weight; flip_and_shift_equally: at the same "
        "weight",
        choices=("none", "flip", "flip_and_shift", "flip_and_shift_equally"),
    )
    tta_fraction: float = _option(
        1.0,
        "fraction of each replica's evaluation batch over whose views logits are averaged: the "
        "images with the lowest probability of the predicted class, so that the result depends on "
        "eval_batch_size and the number of replicas; exported models average over the views of all "
        "images",
        check=FRACTION,
        only_if=OnlyIf("test_time_augmentation", ("none",), unless=True),
    )
    checkpoint_every: Duration = _option(
        Duration(1, "epochs"), "time between checkpoints", check=LASTS
    )
    keep_checkpoints: int = _option(2, "number of latest checkpoints to keep", check=POSITIVE)
    steps_per_call: str = _option(
        "auto",
        "training steps that the host starts at once, at most; auto: those of about a second. A "
        "call ends at the next row of the log, evaluation or checkpoint; callbacks are called once "
        "a call, and Ctrl-C waits for its end",
        choices=("auto",),
        check=Check(
            lambda value: value.isdecimal() and 0 < int(value) < 2**31,
            "be a positive number of steps",
        ),
    )
    log_every: Duration = _option(
        Duration(20, "steps"), "time between rows of metrics.jsonl", check=LASTS
    )
    best_metric: str = _option(
        "auto",
        "what keep_best, early_stopping and stop_at_accuracy compare, of the validation images; "
        "top1 or top5: accuracy; loss, where less is better; of images with several labels map: "
        "mean average precision, or f1_micro or f1_macro: F1 where a class's probability is at "
        "least 1/2; auto: map for these, otherwise top1",
        choices=("auto", *METRICS),
    )
    stop_at_accuracy: float = _option(
        0.0,
        "validation top-1 accuracy, a fraction, at which the run ends, or another best_metric; 0: "
        "train to the end",
        check=BELOW_ONE,
    )
    early_stopping: int = _option(
        0,
        "number of evaluations in a row without a higher validation top-1 accuracy, or a better "
        "best_metric, after which the run ends, as patience in Keras' EarlyStopping; its weights "
        "are the last ones, see keep_best; 0: train to the end",
        check=NOT_NEGATIVE,
    )
    keep_best: bool = _option(
        False,
        "also keep the weights of the evaluation with the highest top-1 accuracy, or the best "
        "best_metric, in model_dir/best: `train` then exports them, and `evaluate` and `export` "
        "take them with --checkpoint=best",
    )
    tensorboard: bool = _option(True, "write scalars and images to model_dir/tensorboard")
    examine: bool = _option(
        True,
        "show some training images as the model sees them and, from the last evaluation, a "
        "confusion matrix and the worst mistakes, in TensorBoard and report.html",
    )
    profile_steps: tuple[int, ...] = _option(
        (),
        "first and last step to profile for TensorBoard, as 100,110",
        check=Check(
            lambda value: not value or (len(value) == 2 and 0 < value[0] <= value[1]),
            "be the first step, from 1, and the last one",
        ),
    )
    mlperf_log: bool = _option(False, "write MLPerf's log to model_dir/mlperf.log")

    def reaches_target(self, row: Mapping[str, Any]) -> bool:
        """Returns whether an evaluation ends the run; an empty one does not."""
        value = row.get(metric_of(row, self.best_metric))
        if value is None or not self.stop_at_accuracy:
            return False
        if self.best_metric == "loss":
            return value <= self.stop_at_accuracy
        return value >= self.stop_at_accuracy


def metric_of(row: Mapping[str, Any], best_metric: str = "auto") -> str:
    """Returns the name in an evaluation's row of what is compared between evaluations."""
    if best_metric != "auto":
        return best_metric
    return "map" if "map" in row else "top1"


def metric_text(row: Mapping[str, Any], name: str, between: str = " ") -> str:
    """Returns a metric's name and value in a row, for people."""
    value = row[name]
    return f"{METRICS[name]}{between}" + (f"{value:.4f}" if name == "loss" else f"{value:.2%}")
