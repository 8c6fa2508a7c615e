"""``UserError``, for errors that the user can fix, and helpers for its messages.

The commands print a ``UserError``, and an ``OSError`` that names a file, as one line without a
traceback, and exit with status 2. Any other exception is a bug in the package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

# How Keras 3 marks words for a terminal.
_BOLD = re.compile(r"\x1b\[\d*m")


class UserError(ValueError):
    """An error that the user can fix. The message says what is wrong, where, and how to fix it."""

    # AutoGraph would replace the error by one whose message is a traceback, and Keras layers would
    # add their arguments to the message.
    ag_pass_through = True
    _keras_call_info_injected = True


class NotNeeded(UserError):  # noqa: N818 - it says what is wrong
    """This worker process has nothing to do; commands say so and exit with status 0."""


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of ``setup.cfg``."""
    return f"`pip install -e '.[{extra}]'` in a clone of imagenet_fast"


def module_missing(error: ModuleNotFoundError) -> UserError:
    """Returns the error for a missing dependency."""
    return UserError(
        f"{error}; install the dependencies: `pip install -e .` in a clone of imagenet_fast"
    )


def nearest(name: str, names: Iterable[str], quote: Callable[[str], str] = repr) -> str:
    """Returns ``; did you mean 'a' or 'b'?`` with the names closest to ``name``, or ``''``."""
    close = difflib.get_close_matches(str(name), list(dict.fromkeys(names)), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(quote, close))}?" if close else ""


def choices_hint(name: str, names: Collection[str]) -> str:
    """Returns :func:`nearest`, or ``; choose from`` all names if none is close."""
    return nearest(name, names) or f"; choose from {', '.join(names)}"


def require_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Checks that an option's value is one of its choices.

    Raises:
      UserError: if it is not, with the closest choices or all.
    """
    if value not in choices:
        raise UserError(f"{option}={value!r} does not exist{choices_hint(value, choices)}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class name if there is no message."""
    lines = _BOLD.sub("", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
