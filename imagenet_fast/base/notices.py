"""What users are told once, however often it comes up."""

from __future__ import annotations

import functools
import sys

from tqdm import tqdm


@functools.cache
def warn_once(message: str) -> None:
    """Writes a line to standard error, past a progress bar, unless it was written before."""
    tqdm.write(message, file=sys.stderr)
