"""This process' memory use, and a limit on it."""

from __future__ import annotations

import pathlib
import re
import resource

_STATUS = pathlib.Path("/proc/self/status")


def memory(field: str) -> int:
    """Returns bytes of this process' memory as Linux counts them; 0 on other systems.

    ``getrusage`` would also count the parent process before ``exec``.

    Args:
      field: ``VmRSS`` for resident memory, ``VmHWM`` for its peak so far, ``VmData`` for what the
        process has allocated, which a limit applies to.
    """
    if not _STATUS.exists():
        return 0
    return 1024 * int(re.findall(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)[0])


def limit_memory(more: int) -> None:
    """Limits this process' allocations to their present size plus ``more`` bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + more,) * 2)
