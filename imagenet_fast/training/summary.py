"""The results of a run, as in its ``summary.json``."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypedDict, Union

import msgspec

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import Count, check_types, read_json
from imagenet_fast.base.paths import to_path
from imagenet_fast.data import bad_images
from imagenet_fast.training.checkpoints.damaged import damaged_checkpoints
from imagenet_fast.training.first_line import device_count, model_devices
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.logger import Row
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.options import MULTI_LABEL_METRICS, metric_of
from imagenet_fast.training.run import Run
from imagenet_fast.training.segments import Passed, passed_segments, read_segments
from imagenet_fast.training.step.calibration import accuracy_interval
from imagenet_fast.training.step.classifier import Classifier

FILE = "summary.json"
# What the last line of a run shows.
_SHOWN = {
    "top1": Union[float, None],
    "epochs": Annotated[float, msgspec.Meta(ge=0, le=1e9)],
    "train_seconds": float,
    "wall_seconds": float,
    "images_per_second": float,
}
_Text = Union[str, None]


class _Hardware(TypedDict, total=False):
    cpu: str
    cores: Count
    gpus: list[str]


class _DamagedCheckpoint(TypedDict):
    step: Count
    reason: str
    resumed_from: Count


# The types of values other than numbers.
_OTHERS = {
    "bad_images": dict[str, Count],
    "damaged_checkpoints": list[_DamagedCheckpoint],
    "devices": list[str],
    "segments": list[Passed],
    **dict.fromkeys(("top1_interval", "top5_interval"), Union[tuple[float, float], None]),
    "hardware": _Hardware,
    "versions": dict[str, str],
    **dict.fromkeys(("stopped", "runs_on", "collective", "command", "finished", "data"), _Text),
}


def make_summary(
    run: Run, model: Classifier, clock: Clock, *, step: int, stopped: str = ""
) -> dict[str, Any]:
    """Returns the results of a run.

    Args:
      run: the run; processes other than its chief have no results from files.
      model: the trained model.
      clock: of the run.
      step: weight updates done.
      stopped: why the run ended before its last step; empty: it did not.
    """
    options, runs_on = run.config, model_devices(model)
    rows = read_rows(options.model_dir) if run.chief else []
    segments = read_segments(options.model_dir) if run.chief else []
    unreadable = bad_images.read_bad_images(options.model_dir) if run.chief else []
    training = [row for row in rows if row["kind"] == "train"]
    validation = [row for row in rows if row["kind"] == "validation"]
    last = validation[-1] if validation else {}
    best = Evaluations.of_rows(validation, options.best_metric).best
    metric = metric_of(best, options.best_metric)
    reached: Row = next((row for row in validation if options.reaches_target(row)), {})
    return {
        "top1": last.get("top1"),
        "top5": last.get("top5"),
        **{
            f"{name}_interval": accuracy_interval(last.get(name), last.get("examples"))
            for name in ("top1", "top5")
        },
        **{name: last[name] for name in MULTI_LABEL_METRICS if name in last},
        "loss": last.get("loss"),
        "best_top1": best.get("top1"),
        f"best_{metric}": best.get(metric),
        "best_step": best.get("step"),
        "train_loss": training[-1].get("loss") if training else None,
        "images_evaluated": last.get("examples"),
        "images_skipped_in_training": sum(row.get("skipped", 0) for row in training),
        "images_skipped_in_evaluation": last.get("skipped"),
        "bad_images": bad_images.count_kinds(unreadable),
        "damaged_checkpoints": damaged_checkpoints(options.model_dir) if run.chief else [],
        "epochs": step / run.steps_per_epoch,
        "steps": step,
        "stopped": stopped or None,
        "train_seconds": clock.train_seconds,
        "compile_seconds": clock.compile_seconds,
        "wall_seconds": clock.wall_seconds,
        "images_per_second": clock.images_per_second,
        "images_per_second_per_device": clock.images_per_second / device_count(model),
        f"target_{metric}": options.stop_at_accuracy or None,
        "train_seconds_to_target": reached.get("train_seconds"),
        "wall_seconds_to_target": reached.get("wall_seconds"),
        "parameters": int(sum(v.shape.num_elements() for v in model.trainable_variables)),
        "replicas": run.replicas,
        "segments": passed_segments(segments, rows, step),
        "runs_on": str(runs_on),
        "devices": runs_on.kind.split("+"),
        "collective": runs_on.collective,
        **environment.provenance(),
        "data": run.info.name,
    }


def write_summary(model_dir: str, summary: dict[str, Any]) -> None:
    """Writes ``summary.json``."""
    write_file(to_path(model_dir, FILE), json.dumps(summary, indent=2) + "\n")


def read_summary(model_dir: str) -> dict[str, Any] | None:
    """Returns what :func:`write_summary` wrote; None: nothing, or nothing readable."""
    try:
        summary = read_json(to_path(model_dir, FILE), dict[str, Any])
        others = {name: kind for name, kind in _OTHERS.items() if name in summary}
        check_types(summary, {**_SHOWN, **others}, Union[float, None])
    except (OSError, ValueError):
        return None
    return summary
