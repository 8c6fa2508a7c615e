"""Logs which workers have not joined yet; TensorFlow itself waits silently."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from imagenet_fast.base.addresses import unreachable
from imagenet_fast.base.worker_process import module_command
from imagenet_fast.distribute.cluster import Cluster

# Seconds before the first message, and between messages.
_FIRST, _EVERY = 20, 60
# Number of concurrent connections: one blocked by a firewall takes seconds to fail.
_CONCURRENT = 64


@contextlib.contextmanager
def log_missing_workers(cluster: Cluster) -> Iterator[None]:
    """In the context, logs regularly which workers cannot be reached, and lets Ctrl-C work.

    A child process logs, because TensorFlow waits in C++ and blocks Python's threads.
    """
    others = [f"{n}={address}" for n, address in enumerate(cluster.workers) if n != cluster.index]
    command = [*module_command(__name__), str(os.getpid()), *others]
    logger = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        with _ended_by_interrupt():
            yield
    finally:
        logger.kill()
        logger.wait()


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """In the context, Ctrl-C ends the process; Python's handler would never run."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # Keep other handlers, for example those of background processes, which ignore it.
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def waiting_message(workers: Sequence[str]) -> str:
    """Returns a message with the workers, ``number=host:port``, that cannot be reached, and why."""
    with concurrent.futures.ThreadPoolExecutor(_CONCURRENT) as pool:
        reasons = pool.map(unreachable, [worker.partition("=")[2] for worker in workers])
        missing = [
            f"worker {worker.replace('=', ' (')}: {reason})"
            for worker, reason in zip(workers, reasons)
            if reason
        ]
    return f"waiting for {', '.join(missing) or 'other workers, whose ports are all open'}"


def main() -> None:
    """Logs while the waiting process, whose id is the first argument, is alive."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in a terminal reaches this process, too.
    waiting, *workers = sys.argv[1:]
    pause = _FIRST
    while True:
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if os.getppid() != int(waiting):
                return
            time.sleep(1)
        print(waiting_message(workers), file=sys.stderr, flush=True)
        pause = _EVERY


if __name__ == "__main__":
    main()
