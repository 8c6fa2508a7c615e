"""The largest size whose program fits a memory, found with few compilations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The most that the size grows at once where several are known: beyond some size XLA computes
# activations twice, and memory grows otherwise.
_MOST_GROWTH = 1.5
# Predictions in a row that do not halve the range.
_PATIENCE = 2


def largest_that_fits(
    candidates: Sequence[int],
    limit: int,
    memory_of: Callable[[int], int | None],
    known: dict[int, int | None],
) -> int:
    """Returns the largest of some sizes whose memory is at most a limit; 0: none fits.

    Memory grows almost linearly with the size: a line through what is known predicts the next try.
    Where that halves the range too seldom, the next try does. At the end two neighbours are known,
    of which the smaller one fits and the larger one does not.

    Args:
      candidates: sizes, ascending.
      limit: bytes.
      memory_of: compiles a size and returns its bytes; None: this size cannot be used, which counts
        as not fitting.
      known: what is known before, by size; at least one.
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
    """Returns the places of the largest size that fits, and of the smallest above that does not."""
    fits = {
        number: (own := tried[size]) is not None and own <= limit
        for number, size in enumerate(candidates)
        if size in tried
    }
    low = max((number for number, own in fits.items() if own), default=-1)
    above = [number for number, own in fits.items() if not own and number > low]
    return low, min(above, default=len(candidates))


def _predict(
    candidates: Sequence[int], limit: int, tried: dict[int, int | None], low: int, high: int
) -> int:
    """Returns the place of the largest candidate that a line through two known sizes lets fit."""
    points = [(0, 0), *sorted((size, own) for size, own in tried.items() if own is not None)]
    smaller = [point for point in points if point[0] <= (candidates[low] if low >= 0 else 0)]
    larger = [point for point in points if point not in smaller]
    if larger:
        one, other = smaller[-1], larger[0]
    elif len(smaller) > 1:
        one, other = smaller[-2:]
    else:
        return (low + high) // 2
    aim = float("inf")
    if one[1] < other[1]:
        aim = one[0] + (limit - one[1]) * (other[0] - one[0]) / (other[1] - one[1])
    if len(smaller) > 2 and not larger:
        aim = min(aim, _MOST_GROWTH * other[0])
    fitting = [number for number, candidate in enumerate(candidates) if candidate <= aim]
    return fitting[-1] if fitting else 0


def divisors(number: int) -> list[int]:
    """Returns what divides a number, ascending."""
    return [own for own in range(1, number + 1) if number % own == 0]


def batch_sizes(most: int) -> list[int]:
    """Returns multiples of 8 up to ``most``, from 256 on 1/16 to 1/32 of themselves apart."""
    sizes, size = [], 8
    while size <= most:
        sizes.append(size)
        step = 8
        while step * 32 <= size:
            step *= 2
        size += step
    return sizes
