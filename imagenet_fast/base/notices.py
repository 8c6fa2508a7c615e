"""Lines on standard error for whoever runs a command."""

from __future__ import annotations

import functools
import sys

from tqdm import tqdm


def say(text: str) -> None:
    """Prints a line about the run."""
    print(text, file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    """Prints a line to standard error, above any progress bar, unless it was printed before."""
    tqdm.write(message, file=sys.stderr)
