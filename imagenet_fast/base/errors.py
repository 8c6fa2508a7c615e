"""The error that a user can mend.

Everything else that the package raises is a bug in the package, but for an ``OSError`` that names a
file. The commands print both as one line, without a traceback, and exit with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable


class UserError(ValueError):
    """Something the user gave cannot be used: the message says what, where, and what to do."""

    # Out of a tf.function and a Keras layer, too: the first would make another error of it, with a
    # traceback as its message, and the second tell with what it was called.
    ag_pass_through = True
    _keras_call_info_injected = True


def how_to_install(extra: str) -> str:
    """Returns the command that installs what a part of the package needs, an extra of setup.cfg."""
    return f"`pip install -e '.[{extra}]'` in a clone of imagenet_fast"


def module_missing(error: ModuleNotFoundError) -> UserError:
    """Returns the error that a package is not installed without which nothing works."""
    return UserError(
        f"{error}; install what it needs: `pip install -e .` in a clone of imagenet_fast"
    )


def nearest(name: str, names: Iterable[str], told: Callable[[str], str] = repr) -> str:
    """Returns ``; did you mean 'a' or 'b'?`` for the names nearest to ``name``, else ``''``.

    Args:
      name: that there is not.
      names: that there are.
      told: what is said in place of one of them.
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(names)), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(told, close))}?" if close else ""


def choices_hint(name: str, names: Collection[str]) -> str:
    """Returns what :func:`nearest` does or, where nothing is near, ``; choose from`` all names."""
    return nearest(name, names) or f"; choose from {', '.join(names)}"


def require_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Checks that there is such a choice of an option.

    Raises:
      UserError: if not, naming those that there are.
    """
    if value not in choices:
        raise UserError(f"{option}={value!r} does not exist{choices_hint(value, choices)}")


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says, or else its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
