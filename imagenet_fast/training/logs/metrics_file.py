"""A run's metrics over time, in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from typing import Any, Union

from imagenet_fast.base.files import LineFile, read_objects
from imagenet_fast.base.outside import Count
from imagenet_fast.base.paths import to_path
from imagenet_fast.training.logs.logger import Logger, Row

METRICS_FILE = "metrics.jsonl"
_LARGEST = 1e30


class JsonLines(Logger):
    """Appends rows to ``metrics.jsonl``; drops rows after the step from which the run resumes."""

    def __init__(self, model_dir: str, step: int) -> None:
        kept = [row for row in read_rows(model_dir) if row["step"] <= step]
        self._file = LineFile(to_path(model_dir, METRICS_FILE), map(json.dumps, kept))

    def write(self, row: Row) -> None:
        """Appends a row atomically."""
        self._file.add(json.dumps(row))

    def flush(self) -> None:
        """Writes the buffered rows."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_rows(model_dir: str) -> list[Row]:
    """Returns the rows of ``metrics.jsonl``, without damaged lines."""
    types = {"kind": str, "step": Count}
    rows = read_objects(to_path(model_dir, METRICS_FILE), types, Union[float, None])
    return [row for row in rows if all(map(_is_usual, row.values()))]


def _is_usual(value: Any) -> bool:
    """Whether charts can show a value; they leave out those that are not finite."""
    return not isinstance(value, float) or not math.isfinite(value) or abs(value) <= _LARGEST
