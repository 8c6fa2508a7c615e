"""The memory of this process, and a limit to it."""

from __future__ import annotations

import pathlib
import re
import resource

_STATUS = pathlib.Path("/proc/self/status")


def memory(field: str) -> int:
    """Returns bytes of memory of this process, as Linux counts them; 0 where it is not Linux.

    ``getrusage`` would count the process that has started this one, too.

    Args:
      field: ``VmRSS`` for what it takes now, ``VmHWM`` for the most so far, ``VmData`` for what it
        has asked for and a limit counts.
    """
    if not _STATUS.exists():
        return 0
    return 1024 * int(re.findall(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)[0])


def limit_memory(more: int) -> None:
    """Has the system refuse this process memory beyond what it has asked for so far.

    Args:
      more: bytes that it may ask for yet.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + more,) * 2)
