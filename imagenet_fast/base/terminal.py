"""Output for a terminal: tables, and text without control characters, which names may contain."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, TextIO

# Control characters but tab and line feed; a carriage return between other characters, where no
# progress bar has one; marks that override the direction of text; separators of lines.
_CONTROL = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|(?<!^)\r(?!\n|\\Z)"
)


def printable(text: str) -> str:
    """Returns a text with control characters as Python's escapes."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class PrintableStream:
    """A text stream that writes control characters as escapes; all else is the given stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text; returns its length."""
        self._stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes several texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Returns the rows of a table as lines whose columns are as wide as their longest cell.

    Args:
      rows: the cells of each row, the same number in all.
      left: the columns that are aligned to the left; the others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
