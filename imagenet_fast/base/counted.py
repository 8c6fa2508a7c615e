"""Numbers with their noun, in singular or plural, for messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns ``1 image``, ``2,000 images``, or with an irregular plural ``2 classes``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
