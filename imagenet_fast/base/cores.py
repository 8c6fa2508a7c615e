"""The number of usable CPU cores."""

from __future__ import annotations

import os


def cpu_cores() -> int:
    """Returns the number of CPU cores this process may use; ``taskset`` or Slurm may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
