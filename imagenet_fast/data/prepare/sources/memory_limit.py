"""A limit on the memory that a library takes for files that others may have made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Limits this process's private memory, in a context, to what it has and some more.

    An allocation above it fails, as if the machine had no more; mapped files do not count. Only
    Linux has such a limit: elsewhere there is none. ``more`` is in bytes.
    """
    if sys.platform != "linux" or not _STATUS.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [_data() + more, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data() -> int:
    """Returns the private memory of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmData"].split()[0]) * 1024
