"""The largest size whose program fits a memory, found with few compilations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

# In a row, predictions that only move the bound by one size; then the range is halved.
_PATIENCE = 2


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
      sizes: the memory in bytes of each size that was tried, in the order of the tries; None: it
        cannot be used at all.
      largest: the largest size that fits, next to one that does not; 0: none fits.
    """

    sizes: dict[int, int | None]
    largest: int


def largest_that_fits(
    candidates: Sequence[int],
    limit: int,
    memory_of: Callable[[int], int | None],
    known: dict[int, int | None],
) -> Search:
    """Searches for the largest of some sizes whose memory is at most a limit.

    Memory grows almost linearly with the size: a line through what is known predicts the next try,
    which ends with neighbours of which one fits and the other one does not.

    Args:
      candidates: sizes, ascending.
      limit: bytes.
      memory_of: compiles a size and returns its bytes; None: this size cannot be used, which counts
        as not fitting.
      known: what is known before; at least one size with its bytes.
    """
    tried = dict(known)
    low, high = -1, len(candidates)  # Those at and below low fit, those at and above high do not.

    def place() -> None:
        nonlocal low, high
        for number, size in enumerate(candidates):
            if size in tried:
                fits = tried[size] is not None and tried[size] <= limit
                if fits:
                    low = max(low, number)
                else:
                    high = min(high, number)

    place()
    steps_of_one = 0
    while high - low > 1:
        guess = _predict(candidates, limit, tried)
        number = min(max(guess, low + 1), high - 1)
        if steps_of_one >= _PATIENCE:
            number, steps_of_one = (low + high) // 2, 0
        size = candidates[number]
        tried[size] = memory_of(size)
        before = (low, high)
        place()
        steps_of_one += (low - before[0] == 1) or (before[1] - high == 1)
    return Search(tried, candidates[low] if low >= 0 else 0)


def _predict(candidates: Sequence[int], limit: int, tried: dict[int, int | None]) -> int:
    """Returns the place of the largest candidate that the nearest known sizes' line lets fit."""
    points = sorted((size, own) for size, own in tried.items() if own is not None)
    # Nearest to the limit: where XLA computes activations twice, memory is bent.
    points = sorted(sorted(points, key=lambda point: abs(point[1] - limit))[:2])
    if len(points) == 1:
        points.insert(0, (0, 0))
    (size, own), (other_size, other) = points
    if other <= own:  # no slope to go by
        return len(candidates) // 2
    aim = size + (limit - own) * (other_size - size) / (other - own)
    fitting = [number for number, candidate in enumerate(candidates) if candidate <= aim]
    return fitting[-1] if fitting else 0


def divisors(number: int) -> list[int]:
    """Returns what divides a number, ascending."""
    return [own for own in range(1, number + 1) if number % own == 0]


def batch_sizes(most: int) -> list[int]:
    """Returns multiples of 8 up to ``most``, no nearer to each other than 1/32 of themselves."""
    sizes, size = [], 8
    while size <= most:
        sizes.append(size)
        step = 8
        while step * 64 <= size:
            step *= 2
        size += step
    return sizes
