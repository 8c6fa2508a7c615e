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
class Times:
    """How long something took, each time that it was done.

    Attributes:
      seconds: by the clock on the wall.
      cpu_seconds: of this process, on all cores together. What other programs do hardly changes
        them; what a GPU does is not in them.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How long two ways to do the same took.

    Attributes:
      title: what was done.
      notes: what a reader must know to judge the numbers, a sentence each.
      names: of this package's way and of the other one.
      times: of both, in that order; the n-th ones were taken one after the other.
      images: handled in each of these times.
    """

    title: str
    notes: tuple[str, ...]
    names: tuple[str, str]
    times: tuple[Times, Times]
    images: int

    @property
    def repeats(self) -> int:
        """Measurements of each."""
        return len(self.times[0].seconds)

    @property
    def ratio(self) -> Spread:
        """This package's time by the other's, of each pair: below 1 where this one is faster."""
        ours, theirs = self.times
        return _ratio(ours.seconds, theirs.seconds)

    @property
    def cpu_ratio(self) -> Spread:
        """The same of the CPU times: fair on a machine that others use too."""
        ours, theirs = self.times
        return _ratio(ours.cpu_seconds, theirs.cpu_seconds)

    def images_per_second(self, index: int) -> Spread:
        """Returns the speed of the first or the second way."""
        return Spread.of([self.images / seconds for seconds in self.times[index].seconds])


def take_turns(
    ours: Callable[[], object], theirs: Callable[[], object], *, warmup: int, repeats: int
) -> tuple[Times, Times]:
    """Times ``ours, theirs, ours, theirs, ...`` so that a change of the machine's speed hits both.

    Args:
      ours: does something once and returns when it is done.
      theirs: does the same in another way.
      warmup: untimed calls of each at first, in which functions are traced and compiled.
      repeats: timed calls of each.

    Returns:
      The times of ``ours`` and of ``theirs``, without warm-up.
    """
    taken: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    with tqdm(total=2 * (warmup + repeats), unit=" calls", dynamic_ncols=True) as bar:
        for turn in range(warmup + repeats):
            bar.set_description("warm-up" if turn < warmup else "timing")
            for call, times in zip((ours, theirs), taken):
                start, cpu_start = time.perf_counter(), time.process_time()
                call()
                times.append((time.perf_counter() - start, time.process_time() - cpu_start))
                bar.update()
    return Times(*zip(*taken[0][warmup:])), Times(*zip(*taken[1][warmup:]))


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    return Spread.of([one / other for one, other in zip(ours, theirs)])
