"""The error class of the network lab."""

from __future__ import annotations


class LabError(Exception):
    """The lab cannot be built as requested; the message says why and what to do."""
