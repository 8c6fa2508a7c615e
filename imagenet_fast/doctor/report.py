"""The doctor's findings as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Sequence

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.doctor.finding import OK, SLOW, WRONG, Finding

_NAME_WIDTH = 18
_STATE_WIDTH = 7


def line(finding: Finding) -> str:
    """Returns a finding as a line, and its advice as another."""
    text = f"{finding.name:{_NAME_WIDTH}}{finding.state:{_STATE_WIDTH}}{finding.found}"
    if not finding.advice:
        return text
    return f"{text}\n{'':{_NAME_WIDTH + _STATE_WIDTH}}{finding.advice}"


def summary(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each state, and the names of those that are not ok."""
    counts = []
    for state in (WRONG, SLOW):
        names = [finding.name for finding in findings if finding.state == state]
        if names:
            counts.append(f"{len(names)} {state} ({', '.join(names)})")
    counts.append(f"{sum(finding.state == OK for finding in findings)} ok")
    return "; ".join(counts)


def write(findings: Sequence[Finding], directory: str | os.PathLike[str]) -> list[str]:
    """Writes ``doctor.json`` and ``doctor.txt``, and returns their paths.

    Args:
      findings: of all checks.
      directory: where; made if it does not exist.

    Raises:
      UserError: if they cannot be written.
    """
    values = {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "summary": summary(findings),
        "host": socket.gethostname(),
        "command": environment.command(),
        "finished": environment.now(),
    }
    lines = [*map(line, findings), "", summary(findings)]
    texts = {
        "doctor.json": json.dumps(values, indent=2) + "\n",
        "doctor.txt": "\n".join(lines) + "\n",
    }
    return write_results(directory, texts)
