"""Being there in time on a machine whose cores the workers use up."""

from __future__ import annotations

import contextlib
import os


def put_first() -> None:
    """Has this process run as soon as it has something to do, where the machine allows that.

    A nice value would not do: many kernels compare it within a terminal's processes only.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
