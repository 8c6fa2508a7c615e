"""A search for the largest program that fits into memory, with few compilations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The largest factor between tries once several sizes are known: beyond some size XLA recomputes
# activations, and memory grows differently.
_MAX_GROWTH = 1.5
# Consecutive predictions that may fail to halve the range.
_PATIENCE = 2


def largest_that_fits(
    candidates: Sequence[int],
    limit: int,
    memory_of: Callable[[int], int | None],
    known: dict[int, int | None],
) -> int:
    """Returns the largest size whose memory is at most a limit; 0: none fits.

    Memory is almost linear in the size, so a line through known sizes predicts the next try. If
    predictions do not halve the range, the search bisects it. At the end two neighbours are known:
    the smaller one fits and the larger one does not.

    Args:
      candidates: sizes, ascending.
      limit: bytes.
      memory_of: compiles a size and returns its bytes; None: this size is invalid, which counts as
        not fitting.
      known: results of sizes that were compiled before, at least one.
    """
    tried = dict(known)
    slow = 0
    while True:
        low, high = _bounds(candidates, limit, tried)
        if high - low <= 1:
            return candidates[low] if low >= 0 else 0
        halve = slow >= _PATIENCE
        guess = (low + high) // 2 if halve else _predict(candidates, limit, tried, low, high)
        size = candidates[min(max(guess, low + 1), high - 1)]
        tried[size] = memory_of(size)
        after = _bounds(candidates, limit, tried)
        bounded = high < len(candidates)
        slow = slow + 1 if bounded and 2 * (after[1] - after[0]) > high - low else 0


def _bounds(candidates: Sequence[int], limit: int, tried: dict[int, int | None]) -> tuple[int, int]:
    """Returns the indices of the largest size that fits and the next one that does not."""
    fits = {
        number: (peak := tried[size]) is not None and peak <= limit
        for number, size in enumerate(candidates)
        if size in tried
    }
    low = max((number for number, fit in fits.items() if fit), default=-1)
    above = [number for number, fit in fits.items() if not fit and number > low]
    return low, min(above, default=len(candidates))


def _predict(
    candidates: Sequence[int], limit: int, tried: dict[int, int | None], low: int, high: int
) -> int:
    """Returns the index of the largest size that fits by a line through two known sizes."""
    points = [(0, 0), *sorted((size, peak) for size, peak in tried.items() if peak is not None)]
    smaller = [point for point in points if point[0] <= (candidates[low] if low >= 0 else 0)]
    larger = [point for point in points if point not in smaller]
    if larger:
        one, other = smaller[-1], larger[0]
    elif len(smaller) > 1:
        one, other = smaller[-2:]
    else:
        return (low + high) // 2
    target = float("inf")
    if one[1] < other[1]:
        target = one[0] + (limit - one[1]) * (other[0] - one[0]) / (other[1] - one[1])
    if len(smaller) > 2 and not larger:
        target = min(target, _MAX_GROWTH * other[0])
    fitting = [number for number, candidate in enumerate(candidates) if candidate <= target]
    return fitting[-1] if fitting else 0


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def batch_sizes(most: int) -> list[int]:
    """Returns multiples of 8 up to ``most``; from 256 on, steps are 1/32 to 1/16 of the size."""
    sizes, size = [], 8
    while size <= most:
        sizes.append(size)
        step = 8
        while step * 32 <= size:
            step *= 2
        size += step
    return sizes
