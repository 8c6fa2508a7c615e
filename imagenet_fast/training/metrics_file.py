"""The rows of a run in its ``metrics.jsonl``."""

from __future__ import annotations

import json
from typing import Any

from imagenet_fast.base.files import LineFile, read_objects
from imagenet_fast.base.paths import to_path

# What :class:`Recorder` tells at a time.
Row = dict[str, Any]
METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends rows to ``metrics.jsonl``; rows of steps that will be done again are dropped.

    Args:
      model_dir: the run's directory.
      step: the step from which the run resumes.
    """

    def __init__(self, model_dir: str, step: int) -> None:
        kept = [row for row in read_rows(model_dir) if row["step"] <= step]
        self._file = LineFile(to_path(model_dir, METRICS_FILE), map(json.dumps, kept))

    def write(self, row: Row) -> None:
        """Appends a row, whole."""
        self._file.add(json.dumps(row))

    def flush(self) -> None:
        """Writes the rows that are still in memory."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_rows(model_dir: str) -> list[Row]:
    """Returns the rows of ``metrics.jsonl``, without lines that are damaged or no rows."""
    return read_objects(to_path(model_dir, METRICS_FILE), {"kind": str, "step": int})
