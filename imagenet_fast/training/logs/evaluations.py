"""A run's evaluations so far, and whether they end it early."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from imagenet_fast.training.logs.logger import Row
from imagenet_fast.training.options import RunOptions, metric_of, metric_text


@dataclasses.dataclass
class Evaluations:
    """The evaluations of a run.

    Attributes:
      last: the last one; empty: none.
      best: the one with the best metric, the first of equal ones; empty: none.
      since_best: number of evaluations after ``best``.
      best_metric: the option.
    """

    last: Row = dataclasses.field(default_factory=dict)
    best: Row = dataclasses.field(default_factory=dict)
    since_best: int = 0
    best_metric: str = "auto"

    @classmethod
    def of_rows(cls, rows: Iterable[Row], best_metric: str = "auto") -> Evaluations:
        """Returns the evaluations with that metric among the rows of ``metrics.jsonl``."""
        evaluations = cls(best_metric=best_metric)
        for row in rows:
            known = row.get(metric_of(row, best_metric)) is not None
            if row["kind"] == "validation" and known:
                evaluations.add(row)
        return evaluations

    @classmethod
    def from_state(cls, state: dict[str, Any], best_metric: str = "auto") -> Evaluations:
        """Restores evaluations from a checkpoint; those of earlier versions lack ``best``."""
        last = state["validation"]
        best = state.get("best", last)
        if not {"step", metric_of(best, best_metric)} <= best.keys():  # there was no evaluation
            best = {}
        since_best = state.get("evaluations_since_best", 0) if best else 0
        return cls(last, best, since_best, best_metric)

    def state(self) -> dict[str, Any]:
        """Returns the values to save in a checkpoint."""
        return {
            "validation": self.last,
            "best": self.best,
            "evaluations_since_best": self.since_best,
        }

    def add(self, row: Row) -> None:
        """Counts an evaluation."""
        self.last = row
        if not self.best or self._is_better(row):
            self.best, self.since_best = row, 0
        else:
            self.since_best += 1

    def _is_better(self, row: Row) -> bool:
        name = metric_of(row, self.best_metric)
        new, old = row[name], self.best.get(name)
        if old is None:  # a damaged file
            return True
        return new < old if name == "loss" else new > old

    def reason_to_stop(self, options: RunOptions) -> str:
        """Returns why the run ends before its last step, as a clause; empty: it does not."""
        if options.reaches_target(self.last):
            return f"where it reached stop_at_accuracy={options.stop_at_accuracy:g}"
        if 0 < options.early_stopping <= self.since_best:
            name = metric_of(self.best, self.best_metric)
            return (
                f"by early_stopping={options.early_stopping}: the best "
                f"{metric_text(self.best, name, ', ')}, is that of step {self.best['step']}"
            )
        return ""
