"""The error that a user can mend.

Everything else that the package raises is a bug in the package. The commands print a ``UserError``
as one line, without a traceback, and exit with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot be used: the message says what, where, and what to do."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns ``; did you mean 'a' or 'b'?`` for the names nearest to ``name``, else ``''``."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
