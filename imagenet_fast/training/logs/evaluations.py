"""A run's evaluations so far, and whether they end it early."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from imagenet_fast.training.logs.logger import Row
from imagenet_fast.training.options import RunOptions


@dataclasses.dataclass
class Evaluations:
    """The evaluations of a run.

    Attributes:
      last: the last one; empty: none.
      best: the one with the highest top-1 accuracy, the first of equal ones; empty: none.
      since_best: number of evaluations after ``best``.
    """

    last: Row = dataclasses.field(default_factory=dict)
    best: Row = dataclasses.field(default_factory=dict)
    since_best: int = 0

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Evaluations:
        """Returns the evaluations with an accuracy among the rows of ``metrics.jsonl``."""
        evaluations = cls()
        for row in rows:
            if row["kind"] == "validation" and row.get("top1") is not None:
                evaluations.add(row)
        return evaluations

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Evaluations:
        """Restores evaluations from a checkpoint; those of earlier versions lack ``best``.

        Args:
          state: a checkpoint's.
        """
        last = state["validation"]
        best = state.get("best", last)
        if not {"step", "top1"} <= best.keys():  # there was no evaluation
            best = {}
        return cls(last, best, state.get("evaluations_since_best", 0) if best else 0)

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
        if not self.best or row["top1"] > self.best["top1"]:
            self.best, self.since_best = row, 0
        else:
            self.since_best += 1

    def reason_to_stop(self, options: RunOptions) -> str:
        """Returns why the run ends before its last step, as a clause; empty: it does not."""
        if options.reaches_target(self.last.get("top1")):
            return f"where it reached stop_at_accuracy={options.stop_at_accuracy:g}"
        if 0 < options.early_stopping <= self.since_best:
            return (
                f"by early_stopping={options.early_stopping}: the best top-1, "
                f"{self.best['top1']:.2%}, is that of step {self.best['step']}"
            )
        return ""
