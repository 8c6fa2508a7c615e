"""Warns which files training waits for, where a disk or a server is slow or unavailable.

TensorFlow's reader waits for a file silently, for hours if need be. So when no step has ended for a
while, this reads a few bytes of each shard, beside training. Slow or failing files are named in a
warning; if there are none, the steps themselves are slow, and nothing is printed.
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
from typing import Any

from tqdm import tqdm

from imagenet_fast.base.paths import is_local, to_path
from imagenet_fast.training.callback import TensorsCallback

_FILES_AT_ONCE = 16
_BYTES = 4096
_FILES_NAMED = 3


class StallWatch(TensorsCallback):
    """Looks at the shards once at first, and again whenever no step has ended for some time.

    Before the first step of a call of ``fit``, which may take long to compile, it does not wait
    for any. All is done in threads that end by themselves, or with the process: a file that hangs
    keeps nothing else waiting.

    Args:
      paths: of the shards that this process reads.
      patience: seconds without a step, of training or evaluation, after which it looks.
      limit: seconds within which a little of a file should have been read.
      pause: seconds between two looks, at least.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        patience: float = 30.0,
        limit: float = 5.0,
        pause: float = 60.0,
    ) -> None:
        super().__init__()
        self._paths = paths
        self._patience, self._limit, self._pause = patience, limit, pause
        self._last_step: float | None = None
        self._look: _Look | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if paths:
            self._thread.start()

    def on_train_begin(self, logs: Any = None) -> None:
        """What follows may have to be compiled."""
        self._last_step = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step has ended."""
        self._last_step = time.monotonic()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step has ended."""
        self._last_step = time.monotonic()

    def on_train_end(self, logs: Any = None) -> None:
        """No step follows."""
        self._last_step = None

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        if self._thread.is_alive():
            # It waits for nothing else; but who writes while Python ends may crash it.
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        self._tell("")
        wait = self._pause
        while not self._closed.wait(wait):
            last_step = self._last_step
            idle = 0.0 if last_step is None else time.monotonic() - last_step
            if idle < self._patience:
                wait = self._patience - idle
            else:
                self._tell(f"no step has ended for {idle:.0f} s; ")
                wait = self._pause

    def _tell(self, since: str) -> None:
        """Looks, and says which files are slow or missing, if any."""
        if self._look is None or not self._look.is_going_on():
            self._look = _Look(self._paths, self._limit)
            self._look.wait(2 * self._limit, self._closed)
        problems = self._look.problems()
        if not problems or self._closed.is_set():
            return
        named = [f"{path} ({problem})" for path, problem in problems[:_FILES_NAMED]]
        more = len(problems) - len(named)
        tqdm.write(
            f"{since}slow or missing files: {', '.join(named)}" + (f", {more} more" * (more > 0)),
            file=sys.stderr,
        )


class _Look:
    """Reads a little of each file, in threads of which any may hang for ever.

    Args:
      paths: of the files.
      limit: seconds within which one should have been read.
    """

    def __init__(self, paths: Sequence[str], limit: float) -> None:
        self._limit = limit
        self._left = collections.deque(paths)
        self._begun: dict[str, float] = {}
        self._ended: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._read, daemon=True)
            for _ in range(min(_FILES_AT_ONCE, len(paths)))
        ]
        for thread in self._threads:
            thread.start()

    def is_going_on(self) -> bool:
        """Returns whether a file hangs."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float, closed: threading.Event) -> None:
        """Waits for all files, but not longer; those whose turn has not come by then are left."""
        deadline = time.monotonic() + seconds
        while self.is_going_on() and time.monotonic() < deadline and not closed.is_set():
            closed.wait(self._limit / 20)
        self._left.clear()

    def problems(self) -> list[tuple[str, str]]:
        """Returns the files that are slow or cannot be read, and why; each that ended but once."""
        now = time.monotonic()
        ended, self._ended = self._ended, {}
        hanging = {
            path: f"nothing read for {now - begun:.0f} s"
            for path, begun in self._begun.copy().items()
            if now - begun > self._limit
        }
        return sorted({**ended, **hanging}.items())

    def _read(self) -> None:
        while True:
            try:
                path = self._left.popleft()
            except IndexError:
                return
            begun = self._begun[path] = time.monotonic()
            try:
                _read_a_little(path)
            except OSError as error:
                self._ended[path] = error.strerror or str(error)
            else:
                seconds = time.monotonic() - begun
                if seconds > self._limit:
                    self._ended[path] = f"{seconds:.0f} s for {_BYTES} bytes"
            del self._begun[path]


def _read_a_little(path: str) -> None:
    """Reads somewhere in a file: the system may remember what lies at its beginning.

    Of a file in a bucket it asks the size alone, since TensorFlow would read 64 MB from anywhere.
    """
    size = to_path(path).stat().st_size
    if not is_local(path):
        return
    with pathlib.Path(path).open("rb", buffering=0) as file:
        offset = random.SystemRandom().randrange(max(size - _BYTES, 0) + 1)
        os.pread(file.fileno(), _BYTES, offset)
