"""Warns about slow or unavailable files that training is waiting for.

TensorFlow's reader waits for a file silently, for hours if need be. If no step has ended for some
time, a thread reads a few bytes of each shard and warns about those that are slow or fail. If none
is, the steps themselves are slow, and nothing is printed.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import sys
import threading
import time
from collections.abc import Sequence

from tqdm import tqdm

from imagenet_fast.base.paths import is_local, to_path
from imagenet_fast.training.logs.logger import Logger

_FILES_AT_ONCE = 16
_BYTES = 4096
_FILES_NAMED = 3


class StallWatch(Logger):
    """Probes the shards at the start, and again whenever no step has ended for some time.

    It ignores the first step, which may take long to compile. Probes run in daemon threads: a file
    that hangs blocks nothing else.

    Args:
      paths: of the shards that this process reads.
      patience: seconds without a step, of training or evaluation, before a probe.
      limit: seconds within which a file's probe should end.
      pause: least seconds between two probes.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        patience: float = 30.0,
        limit: float = 5.0,
        pause: float = 60.0,
    ) -> None:
        self._paths = paths
        self._patience, self._limit, self._pause = patience, limit, pause
        self._last_step: float | None = None
        self._probe: _Probe | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if paths:
            self._thread.start()

    def after_steps(self, step: int) -> None:
        """Notes the time."""
        self._last_step = time.monotonic()

    def after_evaluation_steps(self, step: int) -> None:
        """Notes the time."""
        self._last_step = time.monotonic()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        if self._thread.is_alive():
            # A thread that prints while Python shuts down may crash it.
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        self._warn("")
        wait = self._pause
        while not self._closed.wait(wait):
            last_step = self._last_step
            idle = 0.0 if last_step is None else time.monotonic() - last_step
            if idle < self._patience:
                wait = self._patience - idle
            else:
                self._warn(f"no step has ended for {idle:.0f} s; ")
                wait = self._pause

    def _warn(self, reason: str) -> None:
        """Probes the files and warns about those that are slow or missing."""
        if self._probe is None or not self._probe.running():
            self._probe = _Probe(self._paths, self._limit)
            self._probe.wait(2 * self._limit, self._closed)
        problems = self._probe.problems()
        if not problems or self._closed.is_set():
            return
        named = [f"{path} ({problem})" for path, problem in problems[:_FILES_NAMED]]
        more = len(problems) - len(named)
        tqdm.write(
            f"{reason}slow or missing files: {', '.join(named)}" + (f", {more} more" * (more > 0)),
            file=sys.stderr,
        )


class _Probe:
    """Reads a few bytes of each file, in threads of which any may hang for ever.

    Args:
      paths: of the files.
      limit: seconds within which a read should end.
    """

    def __init__(self, paths: Sequence[str], limit: float) -> None:
        self._limit = limit
        self._queue = collections.deque(paths)
        self._started: dict[str, float] = {}
        self._ended: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._read, daemon=True)
            for _ in range(min(_FILES_AT_ONCE, len(paths)))
        ]
        for thread in self._threads:
            thread.start()

    def running(self) -> bool:
        """Returns whether a read has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float, closed: threading.Event) -> None:
        """Waits for all files for at most ``seconds``, then drops those still in the queue."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline and not closed.is_set():
            closed.wait(self._limit / 20)
        self._queue.clear()

    def problems(self) -> list[tuple[str, str]]:
        """Returns slow and unreadable files, and why; those whose read has ended only once."""
        now = time.monotonic()
        ended, self._ended = self._ended, {}
        hanging = {
            path: f"nothing read for {now - start:.0f} s"
            for path, start in self._started.copy().items()
            if now - start > self._limit
        }
        return sorted({**ended, **hanging}.items())

    def _read(self) -> None:
        while True:
            try:
                path = self._queue.popleft()
            except IndexError:
                return
            start = self._started[path] = time.monotonic()
            try:
                _read_a_little(path)
            except OSError as error:
                self._ended[path] = error.strerror or str(error)
            else:
                seconds = time.monotonic() - start
                if seconds > self._limit:
                    self._ended[path] = f"{seconds:.0f} s for {_BYTES} bytes"
            del self._started[path]


def _read_a_little(path: str) -> None:
    """Reads at a random offset, because the system may cache a file's beginning.

    In a bucket it only gets the size, since TensorFlow reads at least 64 MB.
    """
    size = to_path(path).stat().st_size
    if not is_local(path):
        return
    with pathlib.Path(path).open("rb", buffering=0) as file:
        offset = random.SystemRandom().randrange(max(size - _BYTES, 0) + 1)
        os.pread(file.fileno(), _BYTES, offset)
