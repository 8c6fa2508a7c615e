"""Progress messages with elapsed time, for compilations that take minutes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_EVERY_SECONDS = 1.0


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Prints ``text`` on stderr, and at the end the duration of the context.

    A terminal shows the elapsed seconds meanwhile.
    """
    start = time.monotonic()
    print(f"{text} ...", end="", file=sys.stderr, flush=True)
    done = threading.Event()
    clock = threading.Thread(target=_count, args=(text, start, done), daemon=True)
    if sys.stderr.isatty():
        clock.start()
    try:
        yield
    finally:
        done.set()
        end = f" {time.monotonic() - start:.0f} s"
        if clock.ident is not None:
            clock.join()
            end = f"\r{text} ...{end}"
        print(end, file=sys.stderr, flush=True)


def _count(text: str, start: float, done: threading.Event) -> None:
    while not done.wait(_EVERY_SECONDS):
        seconds = time.monotonic() - start
        print(f"\r{text} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
