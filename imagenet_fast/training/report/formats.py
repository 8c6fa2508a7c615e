"""Formats of the report's numbers; what is not a finite number becomes a dash."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeGuard  # since Python 3.10

MISSING = "\u2013"


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def percent(value: Any) -> str:
    """Formats a fraction as a percentage with two decimals."""
    return f"{value:.2%}" if is_number(value) else MISSING


def interval(bounds: Any) -> str:
    """Formats a pair of fractions; empty if it is none."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2 or not all(map(is_number, bounds)):
        return ""
    return f"{bounds[0]:.1%} to {bounds[1]:.1%}"


def target(value: Any) -> str:
    """Formats a fraction as a percentage without trailing zeros."""
    return f"{100 * value:.6g}%" if is_number(value) else MISSING


def number(value: Any) -> str:
    """Formats whole numbers and those from 1000 in full, others with four digits."""
    if not is_number(value):
        return MISSING
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def whole(value: Any) -> str:
    """Formats a number without decimals."""
    return f"{value:,.0f}" if is_number(value) else MISSING


def count(value: Any, noun: str, plural: str = "") -> str:
    """Formats a number with a noun, in the plural (by default with an s) unless it is 1."""
    return f"{number(value)} {noun if value == 1 else plural or f'{noun}s'}"


def seconds(value: Any) -> str:
    """Formats a time in its two largest units."""
    if not is_number(value):
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
