"""What is being done, and for how long: compiling takes minutes in which nothing else is seen."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_EVERY_SECONDS = 1.0


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Shows on stderr what is done inside, and at its end how long it took.

    On a terminal the seconds are counted while they pass; elsewhere the line is written at the
    beginning, and the seconds are added to it.
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
        told = f" {time.monotonic() - start:.0f} s"
        if clock.ident is not None:
            clock.join()
            told = f"\r{text} ...{told}"
        print(told, file=sys.stderr, flush=True)


def _count(text: str, start: float, done: threading.Event) -> None:
    while not done.wait(_EVERY_SECONDS):
        seconds = time.monotonic() - start
        print(f"\r{text} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
