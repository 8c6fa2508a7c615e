"""Interleaved timing of several ways to do the same work."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

# Does the work once; returns the wall-clock seconds and the CPU seconds that it took.
TimedCall = Callable[[], "tuple[float, float]"]


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarizes at least one measurement."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Times:
    """The duration of every repeat.

    Attributes:
      seconds: wall-clock time.
      cpu_seconds: CPU time of the process on all cores together. It hardly depends on other
        programs' load, and does not include a GPU's work.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of several ways to do the same work.

    Attributes:
      title: the work.
      notes: what a reader needs to judge the numbers, one sentence each.
      names: of the variants, at least two; the first one is compared with each other one.
      times: of each variant. The n-th repeats of all variants followed each other.
      images: processed in one repeat; None if images are not the unit of speed.
      fractions: of the first variant's time, in [0, 1], by what takes it.
    """

    title: str
    notes: tuple[str, ...]
    names: tuple[str, ...]
    times: tuple[Times, ...]
    images: int | None = None
    fractions: Mapping[str, Spread] = dataclasses.field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Timed repeats of each variant."""
        return len(self.times[0].seconds)

    @property
    def ratios(self) -> dict[str, Spread]:
        """The first variant's time divided by each other one's, repeat by repeat.

        Below 1, the first one is faster.
        """
        return self._ratios([times.seconds for times in self.times])

    @property
    def cpu_ratios(self) -> dict[str, Spread]:
        """The same ratios of CPU times, which are fair on a shared machine."""
        return self._ratios([times.cpu_seconds for times in self.times])

    def images_per_second(self, index: int) -> Spread:
        """Returns the speed of one variant; ``images`` must be set."""
        assert self.images
        return Spread.of([self.images / seconds for seconds in self.times[index].seconds])

    def _ratios(self, times: Sequence[Sequence[float]]) -> dict[str, Spread]:
        first, *others = times
        return {
            name: Spread.of([one / two for one, two in zip(first, other)])
            for name, other in zip(self.names[1:], others)
        }


def timed(call: Callable[[], object]) -> TimedCall:
    """Wraps a blocking ``call`` so that it returns its wall-clock and CPU seconds."""

    def run() -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        return time.perf_counter() - start, time.process_time() - cpu_start

    return run


def time_interleaved(calls: Sequence[TimedCall], *, warmup: int, repeats: int) -> tuple[Times, ...]:
    """Times several ways to do the same work, alternating between them.

    Args:
      calls: one for each way.
      warmup: untimed rounds at the start, in which functions are traced and compiled.
      repeats: timed rounds.

    Returns:
      The times of each, without warmup.
    """
    measured = interleave(calls, warmup=warmup, repeats=repeats)
    return tuple(Times(*zip(*times)) for times in measured)


def interleave(
    calls: Sequence[Callable[[], Any]],
    *,
    warmup: int,
    repeats: int,
    name: str = "",
    unit: str = " calls",
    silent: bool = False,
) -> list[list[Any]]:
    """Calls ``a, b, c, a, b, c, ...`` so that changes of the machine's speed affect all alike.

    Args:
      calls: each runs once and returns its measurement.
      warmup: rounds at the start whose measurements are dropped.
      repeats: rounds whose measurements are returned.
      name: shown before the progress bar.
      unit: of the progress bar.
      silent: hides the progress bar, as in all processes but one.

    Returns:
      The measurements of each call.
    """
    results: list[list[Any]] = [[] for _ in calls]
    total = len(calls) * (warmup + repeats)
    with tqdm(total=total, unit=unit, dynamic_ncols=True, disable=silent) as bar:
        for repeat in range(warmup + repeats):
            state = "warmup" if repeat < warmup else "timing"
            bar.set_description(f"{name}, {state}" if name else state)
            for call, measured in zip(calls, results):
                measured.append(call())
                bar.update()
    return [measured[warmup:] for measured in results]
