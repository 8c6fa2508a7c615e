"""The result of a check."""

from __future__ import annotations

import dataclasses
from typing import Any

from imagenet_fast.base.errors import UserError

OK, SLOW, WRONG = "ok", "slow", "wrong"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the doctor's output.

    Attributes:
      name: the check's.
      state: ``ok``; ``slow``: training works, but slower than it could; ``wrong``: it fails.
      found: what was found.
      advice: what to do, unless it is ok.
      numbers: measurements for programs, as JSON values.
    """

    name: str
    state: str
    found: str
    advice: str = ""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


def ok(name: str, found: str, **numbers: Any) -> Finding:
    """Returns the finding of a passed check."""
    return Finding(name, OK, found, numbers=numbers)


def slow(name: str, found: str, advice: str, **numbers: Any) -> Finding:
    """Returns the finding of something that slows training down."""
    return Finding(name, SLOW, found, advice, numbers)


def wrong(name: str, found: str, advice: str = "", **numbers: Any) -> Finding:
    """Returns the finding of something that makes training fail."""
    return Finding(name, WRONG, found, advice, numbers)


def refused(name: str, error: UserError, advice: str = "") -> Finding:
    """Returns an error as a finding; what follows its first semicolon, if any, is the advice."""
    found, _, given = str(error).partition("; ")
    return wrong(name, found, given or advice)
