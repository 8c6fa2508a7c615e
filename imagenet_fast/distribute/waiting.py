"""Tells for whom a worker waits, which TensorFlow does without a word until all have started."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from imagenet_fast.base.addresses import unreachable
from imagenet_fast.distribute.cluster import Cluster

# Seconds until it is told for the first time, and from one time to the next.
_FIRST, _EVERY = 20, 60
# Workers that are asked at a time: one behind a firewall does not answer for seconds.
_AT_ONCE = 64


@contextlib.contextmanager
def waiting_told(cluster: Cluster) -> Iterator[None]:
    """Inside, it is told from time to time which workers cannot be reached, and Ctrl-C works.

    TensorFlow waits in C++ and keeps Python's threads from running: another process has to tell.

    Args:
      cluster: the workers, of which this process is one.
    """
    others = [f"{n}={own}" for n, own in enumerate(cluster.workers) if n != cluster.index]
    place = str(pathlib.Path(__file__).parents[2])  # this package, whatever else is on the path
    program = f"import sys; sys.path.insert(0, {place!r}); import {__name__} as own; own.main()"
    teller = subprocess.Popen(
        [sys.executable, "-c", program, str(os.getpid()), *others], stdin=subprocess.DEVNULL
    )
    try:
        with _ended_by_interrupt():
            yield
    finally:
        teller.kill()
        teller.wait()


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once; Python's own handler would never have its turn."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # of those that do not end by it, as in the background, it stays so
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def told(workers: Sequence[str]) -> str:
    """Returns which workers are waited for, and why those cannot be reached that cannot.

    Args:
      workers: ``number=host:port`` of each of the others.
    """
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = pool.map(unreachable, [own.partition("=")[2] for own in workers])
        lost = [
            f"worker {own.replace('=', ' (')}: {reason})"
            for own, reason in zip(workers, reasons)
            if reason
        ]
    return f"waiting for {', '.join(lost) or 'other workers, at whose ports programs listen'}"


def main() -> None:
    """Tells, as long as the process that waits is there, of which the first argument is the id."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at a terminal reaches this one, too.
    waiting, *workers = sys.argv[1:]
    pause = _FIRST
    while True:
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if os.getppid() != int(waiting):
                return
            time.sleep(1)
        print(told(workers), file=sys.stderr, flush=True)
        pause = _EVERY
