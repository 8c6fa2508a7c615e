"""A discrete-event simulation of synchronous jobs on devices that vary, are slow or fail.

Every step waits for the slowest device. A failure of any device stops all of them; the job restarts
and resumes from its last checkpoint, so the steps since then are repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

import numpy as np

from imagenet_fast.base.errors import UserError

# Points at which the quantiles of the slowest device are computed; between them, interpolated.
_QUANTILES = 4096
# Mean number of failures in an interval that must pass without one; e^-7 of the attempts succeed.
_MAX_FAILURES = 7.0


# The range of each condition. Times that vary by more than a factor of e have another cause.
_DAY = 86_400
_RANGES = (
    ("jitter", 0, 1),
    ("slow_fraction", 0, 1),
    ("slow_factor", 1, 1000),
    ("restart_seconds", 0, _DAY),
    ("checkpoint_seconds", 0, _DAY),
)


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The reliability of devices, and the cost of restarts and checkpoints.

    Attributes:
      jitter: standard deviation of the logarithm of step times, which are log-normal with median 1,
        independently for each device and step.
      slow_fraction: fraction of devices that are slow during the whole job.
      slow_factor: duration of a slow device's step relative to the others'.
      hours_between_failures: mean time between failures of one device, exponentially distributed;
        infinite: it never fails.
      restart_seconds: from a failure until training continues.
      checkpoint_seconds: for which a checkpoint stops the job.

    Raises:
      UserError: if a number is out of range.
    """

    jitter: float = 0.0
    slow_fraction: float = 0.0
    slow_factor: float = 1.0
    hours_between_failures: float = math.inf
    restart_seconds: float = 300.0
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            if not least <= getattr(self, name) <= most:
                raise UserError(
                    f"{name} is {getattr(self, name):g}, but must be between {least:g} and {most:g}"
                )
        if not self.hours_between_failures > 0:
            raise UserError(
                f"hours_between_failures is {self.hours_between_failures:g}, but must be positive"
            )

    def failure_rate(self, devices: int) -> float:
        """Returns the failures per second of all devices together."""
        return devices / (3600 * self.hours_between_failures)


@dataclasses.dataclass(frozen=True)
class Job:
    """A synchronous job.

    Attributes:
      devices: all of which take part in every step.
      steps: their number.
      device_seconds: of a step, computed by each device separately; these vary.
      other_seconds: of a step, spent by all together, such as in gradient all-reduces.
      checkpoint_steps: between checkpoints; the last checkpoint is at the end.
    """

    devices: int
    steps: int
    device_seconds: float
    other_seconds: float
    checkpoint_steps: int

    @property
    def seconds(self) -> float:
        """The duration on identical devices that never fail, without checkpoints."""
        return self.steps * (self.device_seconds + self.other_seconds)


class JobTimes(NamedTuple):
    """The seconds of simulated jobs by cause, float64 [jobs].

    Attributes:
      steps: in completed steps, if all devices were identical.
      waiting: for the slowest device in completed steps.
      checkpoints: in completed checkpoints.
      lost: in steps and checkpoints that a failure undid.
      restarts: from failures until training continued.
      failures: their number.
    """

    steps: np.ndarray
    waiting: np.ndarray
    checkpoints: np.ndarray
    lost: np.ndarray
    restarts: np.ndarray
    failures: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The duration of each job."""
        return self.steps + self.waiting + self.checkpoints + self.lost + self.restarts


def simulate_jobs(job: Job, conditions: Conditions, jobs: int = 200, seed: int = 0) -> JobTimes:
    """Simulates a job ``jobs`` times.

    Raises:
      UserError: if devices fail so often, or are so slow, that the job would hardly ever end.
    """
    _check_reached(job, conditions, conditions.restart_seconds, "to start again")
    seeds = np.random.SeedSequence(seed).spawn(jobs)
    rows = [_simulate(job, conditions, np.random.default_rng(child)) for child in seeds]
    return JobTimes(*np.array(rows, np.float64).T)


def _check_reached(job: Job, conditions: Conditions, seconds: float, what: str) -> None:
    """Raises UserError if ``seconds`` hardly ever pass without a failure."""
    rate = conditions.failure_rate(job.devices)
    if rate * seconds > _MAX_FAILURES:
        raise UserError(
            f"one of {job.devices:,} devices fails every {1 / rate:,.0f} s, and it takes "
            f"{seconds:,.0f} s {what}: the job would hardly ever get that far"
        )


def _simulate(job: Job, conditions: Conditions, rng: np.random.Generator) -> tuple[float, ...]:
    """Returns the fields of :class:`JobTimes` of one job."""
    rate = conditions.failure_rate(job.devices)
    slow = rng.binomial(job.devices, conditions.slow_fraction)
    # With separate random numbers, so that the job's do not change.
    factor = _slowest_of_all(job, conditions, slow, _QUANTILES, np.random.default_rng(0)).mean()
    interval = min(job.checkpoint_steps, job.steps) * (
        job.device_seconds * float(factor) + job.other_seconds
    )
    _check_reached(
        job,
        conditions,
        interval + conditions.checkpoint_seconds,
        "from one checkpoint to the next at the slowest device's speed",
    )
    waiting = checkpoints = lost = restarts = 0.0
    failures = done = 0
    while done < job.steps:
        count = min(job.checkpoint_steps, job.steps - done)
        factors = _slowest_of_all(job, conditions, slow, count, rng)
        seconds = job.device_seconds * float(factors.sum()) + job.other_seconds * count
        # The distribution is memoryless: each attempt may draw the next failure anew.
        until_failure = rng.exponential(1 / rate) if rate else math.inf
        if until_failure < seconds + conditions.checkpoint_seconds:
            failures += 1
            lost += until_failure
            while (until_failure := rng.exponential(1 / rate)) < conditions.restart_seconds:
                failures += 1
                restarts += until_failure
            restarts += conditions.restart_seconds
            continue
        waiting += job.device_seconds * (float(factors.sum()) - count)
        checkpoints += conditions.checkpoint_seconds
        done += count
    return job.seconds, waiting, checkpoints, lost, restarts, failures


def _slowest_of_all(
    job: Job, conditions: Conditions, slow: int, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns the time of the slowest device in each step, if ``slow`` devices are slow."""
    factors = _slowest(job.devices - slow, conditions.jitter, steps, rng)
    if slow:
        slow_factors = _slowest(slow, conditions.jitter, steps, rng)
        factors = np.maximum(factors, conditions.slow_factor * slow_factors)
    return factors


def _slowest(devices: int, jitter: float, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the time of the slowest of equally fast devices in each step, float64 [steps].

    One draw per step suffices: P(slowest of n < x) = P(one < x) ** n.
    """
    if not devices or not jitter:
        return np.full(steps, float(devices > 0))
    places, values = _quantiles_of_slowest(devices)
    return np.exp(jitter * np.interp(rng.random(steps), places, values))


@functools.lru_cache(maxsize=64)
def _quantiles_of_slowest(devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns probabilities, and the quantiles of the largest of ``devices`` normal numbers."""
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = statistics.NormalDist()
    return places, np.array([normal.inv_cdf(place ** (1 / devices)) for place in places])


def best_interval(checkpoint_seconds: float, failure_rate: float) -> float:
    """Returns the seconds of work between checkpoints that minimize the job's mean duration.

    About ``sqrt(2 * checkpoint_seconds / failure_rate)`` (Young 1974). Exactly, it minimizes the
    mean duration of an interval with its checkpoint, ``(e^(failure_rate * seconds) - 1) /
    failure_rate`` (Daly 2006), divided by its work.
    """
    if not failure_rate:
        return math.inf
    if not checkpoint_seconds:
        return 0.0
    # The derivative is 0 where (1 - x) e^x = e^(-rate * checkpoint) for x = rate * interval. The
    # left side falls from 1 at x = 0 to 0 at x = 1.
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        # Logarithms of both sides: near 0 their difference would be lost to rounding.
        if math.log1p(-middle) + middle > -failure_rate * checkpoint_seconds:
            low = middle
        else:
            high = middle
    return low / failure_rate
