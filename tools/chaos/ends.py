"""How a run has ended: its last checkpoint and its rows, and what differs between two ends."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
from typing import Any

# Of rows: measured times.
_TIMES = {"train_seconds", "wall_seconds", "images_per_second"}
_FILES = ("summary.json", "report.html")


def end_of(model_dir: pathlib.Path) -> dict[str, Any]:
    """Returns digests of all variables in the last checkpoint, the rows without times, and files.

    For a process that may start threads.
    """
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    variables = {
        name: hashlib.sha256(reader.get_tensor(name).tobytes()).hexdigest()
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


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Returns the first thing in which an end differs from another; empty: they are equal."""
    if found["variables"].keys() != expected["variables"].keys():
        return "the last checkpoint has other variables"
    digests = expected["variables"]
    names = [name for name in digests if found["variables"][name] != digests[name]]
    if names:
        return f"{len(names)} of {len(digests)} variables differ, as {names[0]}"
    steps = [[(row["kind"], row["step"]) for row in end["rows"]] for end in (found, expected)]
    if steps[0] != steps[1]:
        pairs = itertools.zip_longest(*steps)
        number, (own, other) = next((n, pair) for n, pair in enumerate(pairs) if len({*pair}) > 1)
        return f"row {number} is {own}, not {other}"
    for row, other in zip(found["rows"], expected["rows"]):
        names = [name for name in other if row.get(name) != other[name]]
        if names:
            name = names[0]
            return f"{name} of step {other['step']} is {row.get(name)!r}, not {other[name]!r}"
    if found["files"] != expected["files"]:
        return f"files are {found['files']}, not {expected['files']}"
    return ""
