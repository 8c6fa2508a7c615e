"""How a run has ended: its last checkpoint and its rows, and what differs between two ends."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from typing import Any

# Of rows: measured times.
_TIMES = {"train_seconds", "wall_seconds", "images_per_second"}
_FILES = ("summary.json", "report.html")


def end_of(model_dir: pathlib.Path) -> dict[str, Any]:
    """Returns all variables in the last checkpoint, the rows without times, and files.

    For a process that may start threads.
    """
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    variables = {
        name: _flat(reader.get_tensor(name))
        for name in sorted(reader.get_variable_to_shape_map())
        if name.endswith("/.ATTRIBUTES/VARIABLE_VALUE")
    }
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    rows = [
        {name: value for name, value in json.loads(line).items() if name not in _TIMES}
        for line in lines
    ]
    files = [name for name in _FILES if (model_dir / name).exists()]
    return {"variables": variables, "rows": rows, "files": files}


def _flat(value: Any) -> list[Any]:
    """Returns an array, or a scalar, as a list that JSON keeps to the bit."""
    import numpy as np

    array = np.asarray(value)
    return array.ravel().tolist() if array.dtype.kind in "fiub" else [repr(value)]


def difference(found: dict[str, Any], expected: dict[str, Any], rounding: float = 0) -> str:
    """Returns the first thing in which an end differs from another; empty: they are equal.

    Args:
      found: the end.
      expected: the other one.
      rounding: the largest difference of numbers, relative to the largest one of their variable.
    """
    if found["variables"].keys() != expected["variables"].keys():
        return "the last checkpoint has other variables"
    variables = expected["variables"]
    names = [n for n in variables if not _close(found["variables"][n], variables[n], rounding)]
    if names:
        return f"{len(names)} of {len(variables)} variables differ, as {names[0]}"
    steps = [[(row["kind"], row["step"]) for row in end["rows"]] for end in (found, expected)]
    if steps[0] != steps[1]:
        pairs = itertools.zip_longest(*steps)
        number, (own, other) = next((n, pair) for n, pair in enumerate(pairs) if len({*pair}) > 1)
        return f"row {number} is {own}, not {other}"
    for row, other in zip(found["rows"], expected["rows"]):
        names = [name for name in other if not _close([row.get(name)], [other[name]], rounding)]
        if names:
            name = names[0]
            return f"{name} of step {other['step']} is {row.get(name)!r}, not {other[name]!r}"
    if found["files"] != expected["files"]:
        return f"files are {found['files']}, not {expected['files']}"
    return ""


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Returns the largest difference of a number in two ends' variables, relative as above."""
    pairs = [(found["variables"].get(name), other) for name, other in expected["variables"].items()]
    return max(
        max(abs(a - b) for a, b in zip(own, other)) / (max(map(abs, other)) or 1)
        for own, other in pairs
        if own and isinstance(other[0], float)
    )


def _close(found: list[Any], expected: list[Any], rounding: float) -> bool:
    """Returns whether values are equal, but for rounding."""
    if found == expected or not rounding:
        return found == expected
    numbers = (*found, *expected)
    if len(found) != len(expected) or not all(isinstance(each, float) for each in numbers):
        return False
    limit = rounding * max(map(abs, expected))
    return all(math.isclose(a, b, rel_tol=0, abs_tol=limit) for a, b in zip(found, expected))
