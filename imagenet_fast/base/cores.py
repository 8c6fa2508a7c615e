"""The cores of this machine's processors."""

from __future__ import annotations

import os


def cpu_cores() -> int:
    """Returns the cores that this process may use, of which ``taskset`` or Slurm may leave few."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
