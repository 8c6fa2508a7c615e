"""The error that a user can mend."""

from __future__ import annotations


class LabError(Exception):
    """The lab cannot be built, or not as asked: the message says why and what to do."""
