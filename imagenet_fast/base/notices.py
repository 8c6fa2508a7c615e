"""Warnings that are printed once per process."""

from __future__ import annotations

import functools
import sys

from tqdm import tqdm


@functools.cache
def warn_once(message: str) -> None:
    """Prints a line to standard error, above any progress bar, unless it was printed before."""
    tqdm.write(message, file=sys.stderr)
