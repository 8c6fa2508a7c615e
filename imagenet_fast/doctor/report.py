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
    """Returns a finding as a line, and what to do as another one."""
    text = f"{finding.name:{_NAME_WIDTH}}{finding.state:{_STATE_WIDTH}}{finding.found}"
    if not finding.advice:
        return text
    return f"{text}\n{'':{_NAME_WIDTH + _STATE_WIDTH}}{finding.advice}"


def summary(findings: Sequence[Finding]) -> str:
    """Returns how many findings there are of each state, and which are not ok."""
    told = []
    for state in (WRONG, SLOW):
        names = [own.name for own in findings if own.state == state]
        if names:
            told.append(f"{len(names)} {state} ({', '.join(names)})")
    count = sum(own.state == OK for own in findings)
    return "; ".join([*told, f"{count} ok"])


def write(findings: Sequence[Finding], directory: str | os.PathLike[str]) -> list[str]:
    """Writes ``doctor.json`` and ``doctor.txt``, and returns their paths.

    Args:
      findings: of all checks.
      directory: where; made if it does not exist.

    Raises:
      UserError: if they cannot be written.
    """
    values = {
        "findings": [dataclasses.asdict(own) for own in findings],
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
