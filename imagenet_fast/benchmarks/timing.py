"""Two ways to do the same, timed in turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some measurements, the least and the greatest."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Takes at least one measurement."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How long two ways to do the same took.

    Attributes:
      title: what was done.
      notes: what a reader must know to judge the numbers, a sentence each.
      names: of this package's way and of the other one.
      seconds: of both, in that order: a time for each repeat, the n-th ones taken one after the
        other.
      images: handled in each of these times.
    """

    title: str
    notes: tuple[str, ...]
    names: tuple[str, str]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    images: int

    @property
    def repeats(self) -> int:
        """Measurements of each."""
        return len(self.seconds[0])

    @property
    def ratio(self) -> Spread:
        """This package's time by the other's, of each pair: below 1 where this one is faster."""
        return Spread.of([ours / theirs for ours, theirs in zip(*self.seconds)])

    def images_per_second(self, index: int) -> Spread:
        """Returns the speed of the first or the second way."""
        return Spread.of([self.images / seconds for seconds in self.seconds[index]])


def take_turns(
    ours: Callable[[], object], theirs: Callable[[], object], *, warmup: int, repeats: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times ``ours, theirs, ours, theirs, ...`` so that a change of the machine's speed hits both.

    Args:
      ours: does something once and returns when it is done.
      theirs: does the same in another way.
      warmup: untimed calls of each at first, in which functions are traced and compiled.
      repeats: timed calls of each.

    Returns:
      The seconds of each call of ``ours`` and of ``theirs``.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    with tqdm(total=2 * (warmup + repeats), unit=" calls", dynamic_ncols=True) as bar:
        for turn in range(warmup + repeats):
            bar.set_description("warm-up" if turn < warmup else "timing")
            for call, times in zip((ours, theirs), seconds):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                bar.update()
    return tuple(seconds[0][warmup:]), tuple(seconds[1][warmup:])
