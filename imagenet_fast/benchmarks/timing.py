"""Several ways to do the same, timed in turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

# Does something once; returns how long that took, in seconds by the clock and of CPU time.
Timed = Callable[[], "tuple[float, float]"]


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
      cpu_seconds: of the process that did it, on all cores together. What other programs do hardly
        changes them; what a GPU does is not in them.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How long some ways to do the same took.

    Attributes:
      title: what was done.
      notes: what a reader must know to judge the numbers, a sentence each.
      names: of the ways, at least two: the one of interest, then those that it is compared with.
      times: of each, in that order; the n-th ones were taken one after the other.
      images: handled in each of these times; None where speed is not a matter of images.
      shares: of the first one's time that something takes, in 0 to 1, by what that is.
    """

    title: str
    notes: tuple[str, ...]
    names: tuple[str, ...]
    times: tuple[Times, ...]
    images: int | None = None
    shares: Mapping[str, Spread] = dataclasses.field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Measurements of each."""
        return len(self.times[0].seconds)

    @property
    def ratios(self) -> dict[str, Spread]:
        """The first one's time by that of each other one, turn by turn; below 1 it is faster."""
        return self._ratios([times.seconds for times in self.times])

    @property
    def cpu_ratios(self) -> dict[str, Spread]:
        """The same of the CPU times, fair on a machine that others use too."""
        return self._ratios([times.cpu_seconds for times in self.times])

    def images_per_second(self, index: int) -> Spread:
        """Returns the speed of one of the ways, where ``images`` is given."""
        assert self.images
        return Spread.of([self.images / seconds for seconds in self.times[index].seconds])

    def _ratios(self, times: Sequence[Sequence[float]]) -> dict[str, Spread]:
        first, *others = times
        return {
            name: Spread.of([one / two for one, two in zip(first, other)])
            for name, other in zip(self.names[1:], others)
        }


def timed(call: Callable[[], object]) -> Timed:
    """Returns ``call``, which returns when it is done, with the times that it takes."""

    def run() -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        return time.perf_counter() - start, time.process_time() - cpu_start

    return run


def take_turns(calls: Sequence[Timed], *, warmup: int, repeats: int) -> tuple[Times, ...]:
    """Times what does the same in several ways, in turns.

    Args:
      calls: what does the same, each in another way.
      warmup: turns that do not count at first, in which functions are traced and compiled.
      repeats: turns that count.

    Returns:
      The times of each, without warm-up.
    """
    taken = in_turns(calls, warmup=warmup, repeats=repeats)
    return tuple(Times(*zip(*times)) for times in taken)


def in_turns(
    measures: Sequence[Callable[[], Any]],
    *,
    warmup: int,
    repeats: int,
    name: str = "",
    unit: str = " calls",
    silent: bool = False,
) -> list[list[Any]]:
    """Measures ``a, b, c, a, b, c, ...`` so that a change of the machine's speed hits all alike.

    Args:
      measures: each does something once and returns what was measured.
      warmup: turns that do not count at first.
      repeats: turns that count.
      name: of them all, for the progress bar.
      unit: of the bar: what is done at once.
      silent: whether there is no bar, as in all processes but one.

    Returns:
      What each returned, without warm-up.
    """
    taken: list[list[Any]] = [[] for _ in measures]
    total = len(measures) * (warmup + repeats)
    with tqdm(total=total, unit=unit, dynamic_ncols=True, disable=silent) as bar:
        for turn in range(warmup + repeats):
            state = "warm-up" if turn < warmup else "timing"
            bar.set_description(f"{name}, {state}" if name else state)
            for measure, own in zip(measures, taken):
                own.append(measure())
                bar.update()
    return [own[warmup:] for own in taken]
