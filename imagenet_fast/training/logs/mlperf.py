"""A run's log in MLPerf Training's format: lines of ``:::MLLOG`` and JSON.

Format and names are those of github.com/mlcommons/logging. Its compliance checker (PyPI's
``mlperf-logging``) accepts the file once the submitter has added the lines ``submission_...`` and
``cache_clear``. That package does not write the lines: it cannot continue a log after a restart,
and depends on pandas and SciPy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any, TypedDict

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import LineFile, whole_lines
from imagenet_fast.base.outside import Count, as_type, parse_json
from imagenet_fast.base.paths import to_path
from imagenet_fast.optimizers.options import UpdateOptions
from imagenet_fast.training.logs.logger import Logger, Row
from imagenet_fast.training.options import metric_of
from imagenet_fast.training.run import Run
from imagenet_fast.training.schedule_steps import decay_boundaries, decay_steps, warmup_steps

FILE = "mlperf.log"
_MARK = ":::MLLOG "

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class _Metadata(TypedDict, total=False):
    step_num: Count


class _Line(TypedDict):
    key: str
    metadata: _Metadata


class MLPerfLog(Logger):
    """Writes the log of a run over all its restarts.

    A resumed run drops the lines after the step from which it resumes, and its earlier end. Epochs
    count from 1; an evaluation has the number of finished epochs.

    A call of steps must end after each epoch. ``now`` returns seconds since 1970.
    """

    def __init__(
        self,
        run: Run,
        *,
        step: int,
        batch_norm_examples: int,
        last_step: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._step = step
        options, self._steps_per_epoch = run.config, run.steps_per_epoch
        self._best_metric = options.best_metric
        self._now = now
        lines = read_lines(options.model_dir) if step else []
        trains = step < last_step
        kept = [line for line in lines if not trains or _stays_true(line, step)]
        keys = [line["key"] for line in kept]
        self._ended = "run_stop" in keys
        self._in_epoch = keys.count("epoch_start") > keys.count("epoch_stop")
        self._file = LineFile(to_path(options.model_dir, FILE), map(_text, kept))
        self._started = "run_start" in keys
        if "init_start" not in keys:
            self._write(_START, "init_start")
            values = {
                "seed": options.seed,
                "train_samples": run.examples("train"),
                "eval_samples": run.examples("validation"),
                "model_bn_span": batch_norm_examples,
                **_hyperparameters(options, run.steps_per_epoch),
            }
            for key, value in values.items():
                self._write(_POINT, key, value)

    def before_images(self) -> None:
        """Writes the start of the run, unless it is there."""
        if not self._started:
            self._write(_END, "init_stop")
            self._write(_START, "run_start")
            self._started = True

    def before_steps(self, step: int) -> None:
        """Writes the start of an epoch before its first step."""
        if not self._in_epoch:
            # With the number of its first step: dropped if a resumed run repeats that step.
            number = self._step // self._steps_per_epoch + 1
            self._write(_START, "epoch_start", epoch_num=number, step_num=step + 1)
            self._in_epoch = True

    def after_steps(self, step: int) -> None:
        """Writes the end of an epoch after its last step."""
        self._step = step
        if step % self._steps_per_epoch == 0:
            self._end_epoch()

    def before_evaluation(self, step: int) -> None:
        """Writes the start of an evaluation."""
        self._write(_START, "eval_start", epoch_num=self._epochs_done())

    def write(self, row: Row) -> None:
        """Writes the end of an evaluation and its accuracy."""
        if row["kind"] == "validation":
            epochs = self._epochs_done()
            accuracy = row[metric_of(row, self._best_metric)]
            self._write(_POINT, "eval_accuracy", accuracy, epoch_num=epochs)
            self._write(_END, "eval_stop", epoch_num=epochs)

    def finish(self, success: bool) -> None:
        """Writes the end of the run, unless it is there."""
        if not self._ended:
            self._end_epoch()
            self._write(_END, "run_stop", status="success" if success else "aborted")
            self._ended = True

    def flush(self) -> None:
        """Writes the buffered lines."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _epochs_done(self) -> float:
        epochs = self._step / self._steps_per_epoch
        return int(epochs) if epochs.is_integer() else epochs

    def _end_epoch(self) -> None:
        if self._in_epoch:
            done = math.ceil(self._step / self._steps_per_epoch)
            self._write(_END, "epoch_stop", epoch_num=done)
            self._in_epoch = False

    def _write(self, event: str, key: str, value: Any = None, **metadata: Any) -> None:
        line = {
            "namespace": "",
            "time_ms": round(1000 * self._now()),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": {"step_num": self._step, **metadata},
        }
        self._file.add(_text(line))


def read_lines(model_dir: str) -> list[dict[str, Any]]:
    """Returns the lines of a run's log, without an incomplete last one.

    Raises:
      UserError: if one is damaged.
    """
    file = to_path(model_dir, FILE)
    lines = [line[len(_MARK) :] for line in whole_lines(file) if line.startswith(_MARK)]
    try:
        found = [parse_json(line, dict[str, Any]) for line in lines]
        for line in found:
            as_type(line, _Line)
        return found
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): remove it") from None


def _text(line: dict[str, Any]) -> str:
    return f"{_MARK}{json.dumps(line)}"


def _stays_true(line: dict[str, Any], step: int) -> bool:
    """Returns whether a line still holds for a run that resumes from a step."""
    # Lines that users have added have no step.
    return line["metadata"].get("step_num", 0) <= step and line["key"] != "run_stop"


def _hyperparameters(options: UpdateOptions, steps_per_epoch: int) -> dict[str, Any]:
    """Returns hyperparameters under MLPerf's names."""
    prefix = f"{options.optimizer}_opt" if options.optimizer in ("sgd", "lars") else "opt"
    warmup = warmup_steps(options, steps_per_epoch)
    warmup_prefix = "lars_opt" if options.optimizer == "lars" else "opt"
    values = {
        "global_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulation_steps,
        "opt_name": options.optimizer,
        f"{prefix}_base_learning_rate": options.scaled_learning_rate,
        f"{prefix}_momentum": options.momentum,
        f"{prefix}_weight_decay": options.weight_decay,
        f"{warmup_prefix}_learning_rate_warmup_epochs": warmup / steps_per_epoch,
    }
    if options.optimizer == "lars":
        values["lars_epsilon"] = options.optimizer_epsilon
    if options.schedule in ("polynomial", "cosine"):
        values[f"{prefix}_end_learning_rate"] = options.end_learning_rate
        values[f"{prefix}_learning_rate_decay_steps"] = decay_steps(options, steps_per_epoch)
    if options.schedule == "polynomial":
        values[f"{prefix}_learning_rate_decay_poly_power"] = options.decay_power
    if options.schedule == "steps":
        boundaries = decay_boundaries(options, steps_per_epoch)
        values["opt_learning_rate_decay_boundary_steps"] = boundaries
        values["opt_learning_rate_decay_factor"] = options.decay_factor
    return values
