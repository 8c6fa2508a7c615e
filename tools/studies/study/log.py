"""A study's log: one line of JSON for each completed run, from which the study resumes."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from imagenet_fast.base.errors import UserError
from study.settings import Setting

Record = dict[str, Any]
Key = tuple[str, int]


def key(setting: Setting, seed: int) -> Key:
    """Returns the key of a run in the log."""
    return setting.fingerprint, seed


def read(path: pathlib.Path) -> dict[Key, Record]:
    """Returns the records by key; the last one of those with the same key.

    An incomplete last line is ignored.

    Raises:
      UserError: if the file is not a log.
    """
    if not path.exists():
        return {}
    records = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            records[record["fingerprint"], record["seed"]] = record
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not a record of a run") from None
    return records


def append(path: pathlib.Path, setting: Setting, seed: int, result: Record) -> None:
    """Appends a run."""
    record = {
        "fingerprint": setting.fingerprint,
        "seed": seed,
        "method": setting.method,
        "batch": setting.batch,
        **result,
    }
    text = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        # Removes the rest of an interrupted write.
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
