"""A run's learning-rate schedule as a table, a CSV file and a plot."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import steps_per_epoch
from imagenet_fast.optimizers.schedules import Schedule
from imagenet_fast.training.build.schedule import build_schedule, warn_of_short_run
from imagenet_fast.training.logs.metrics_file import Row
from imagenet_fast.training.report.charts import LEARNING_RATE
from imagenet_fast.training.schedule_steps import decay_boundaries, total_steps, warmup_steps

# Rows of the CSV file and points of the plot.
_MAX_ROWS = 2000


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """The learning rates of a run.

    Attributes:
      config: the run's options.
      examples: number of training images.
      steps_per_epoch: weight updates in an epoch.
      total_steps: weight updates in the run.
      warmup_steps: weight updates of the warmup, not always an integer; 0: no warmup.
      schedule: maps a step to its learning rate.
    """

    config: Config
    examples: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: float
    schedule: Schedule

    def table(self) -> str:
        """Returns the schedule as text."""
        config = self.config
        epochs = self.total_steps / self.steps_per_epoch
        start = f"{self._learning_rate(0):g}"
        warmup = f"gradual, {round(self.warmup_steps, 2):,} steps from {start}"
        lines = [
            f"images     {self.examples:,}",
            f"batch      {config.batch_size:,} images",
            f"epoch      {self.steps_per_epoch:,} steps",
            f"run        {self.total_steps:,} steps, {epochs:.6g} epochs",
            f"warmup     {warmup if self.warmup_steps else 'none'}",
            f"schedule   {config.schedule}",
        ]
        lines += ["", f"{'step':>10} {'epoch':>10} {'learning rate':>13}"]
        for step, label in self.milestones.items():
            epoch, rate = step / self.steps_per_epoch, self._learning_rate(step)
            lines.append(f"{step:>10,} {epoch:>10.4f} {rate:>13.7g}  {label}")
        return "\n".join([*lines, "", "Step n is the weight update after n others."])

    @functools.cached_property
    def milestones(self) -> dict[int, str]:
        """The steps at which the schedule changes, in order, and their labels."""
        named = [(0, "start"), (self.total_steps, "end of the run")]
        if self.warmup_steps:
            after = math.ceil(self.warmup_steps)
            named += [(after - 1, "last of the warmup"), (after, "after the warmup")]
        named += self._changes()
        labels: dict[int, list[str]] = {}
        for step, label in sorted(named, key=lambda pair: pair[0]):
            labels.setdefault(step, []).append(label)
        return {step: ", ".join(names) for step, names in labels.items()}

    def files(self) -> dict[str, str]:
        """Returns the contents of the plan's files, by name."""
        return {"schedule.csv": self.csv(), "schedule.svg": self.picture()}

    def csv(self) -> str:
        """Returns step, epoch and learning rate of all steps, or of 2000 with the milestones."""
        lines = [
            f"{row['step']},{row['epoch']:.6f},{row['learning_rate']:.9g}" for row in self.rows
        ]
        return "\n".join(["step,epoch,learning_rate", *lines]) + "\n"

    def picture(self) -> str:
        """Returns a plot of learning rate over epochs as SVG."""
        config = self.config
        title = f"{config.schedule} schedule, batch {config.batch_size:,}, {config.duration}"
        return LEARNING_RATE.picture(self.rows, title)

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The learning rates as rows of a run's metrics, at most 2000."""
        # Both sides of possible jumps.
        sides = {step - offset for step in self.milestones for offset in (0, 1) if step >= offset}
        others = np.linspace(0, self.total_steps, min(_MAX_ROWS - len(sides), self.total_steps + 1))
        return [
            {
                "kind": "train",
                "step": step,
                "epoch": step / self.steps_per_epoch,
                "learning_rate": self._learning_rate(step),
            }
            for step in sorted(sides | set(np.rint(others).astype(int).tolist()))
        ]

    def _changes(self) -> list[tuple[int, str]]:
        """Returns where the schedule changes; for smooth schedules, quarters of the run."""
        config, total = self.config, self.total_steps
        often = config.schedule == "steps" and config.decay_every.amount
        if config.schedule in ("polynomial", "cosine") or often:
            parts = {"1/4": 0.25, "1/2": 0.5, "3/4": 0.75}
            return [(round(total * part), f"{name} of the run") for name, part in parts.items()]
        if config.schedule == "steps":
            steps = decay_boundaries(config, self.steps_per_epoch)
            changes = [(step, f"times {config.decay_factor:g}") for step in steps]
        elif config.schedule == "piecewise_linear":
            changes = [(step, "knot") for step in self.schedule.steps]
        else:
            changes = []
        return [(step, label) for step, label in changes if 0 <= step <= total]

    @functools.cached_property
    def _compiled(self) -> Callable[[tf.Tensor], tf.Tensor]:
        # Op by op, 2,000 steps take ten seconds.
        return tf.function(self.schedule, input_signature=[tf.TensorSpec([], tf.int64)])

    def _learning_rate(self, step: int) -> float:
        return float(self._compiled(tf.constant(step, tf.int64)))


def plan_schedule(config: Config) -> SchedulePlan:
    """Computes the learning rates of a run.

    Raises:
      UserError: if the data cannot be used, or the schedule does not fit the run.
    """
    info = read_info(config)
    examples = info.splits["train"].examples
    steps = steps_per_epoch(info, config)
    warn_of_short_run(config, steps)
    return SchedulePlan(
        config,
        examples,
        steps,
        total_steps(config, steps),
        warmup_steps(config, steps),
        build_schedule(config, steps),
    )
