"""How long a synchronous job takes whose devices vary, are slow or fail: a simulation by events.

Every step waits for the slowest device. A failure of any device stops all of them; the job starts
again and goes on from its last checkpoint, so that the steps since then are made once more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

import numpy as np

from imagenet_fast.base.errors import UserError

# Points of the quantiles of the slowest of many devices, between which they are interpolated.
_QUANTILES = 4096
# Mean number of failures in a time that has to pass without one; e^-7 of the attempts succeed.
_MOST_FAILURES = 7.0


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What devices do to a job.

    Attributes:
      jitter: standard deviation of the logarithm of a device's time for a step: the times of all
        devices and steps are drawn from a log-normal distribution with the median 1.
      slow_share: share of devices that are slow in all of a job.
      slow_factor: times the time of the others that these take.
      hours_between_failures: mean, of one device, exponentially distributed; infinite: never.
      restart_seconds: from a failure until steps are made again.
      checkpoint_seconds: for which a checkpoint stops the job.

    Raises:
      UserError: if a number is negative, or the share above 1.
    """

    jitter: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    hours_between_failures: float = math.inf
    restart_seconds: float = 300.0
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise UserError(
                    f"{field.name} is {getattr(self, field.name):g}, but must not be negative"
                )
        if self.slow_share > 1:
            raise UserError(f"slow_share is {self.slow_share:g}, but is a share: at most 1")
        if not self.hours_between_failures:
            raise UserError("hours_between_failures is 0: nothing would ever be done")

    def failure_rate(self, devices: int) -> float:
        """Returns the failures a second of any of so many devices."""
        return devices / (3600 * self.hours_between_failures)


@dataclasses.dataclass(frozen=True)
class Job:
    """What there is to do.

    Attributes:
      devices: that each make a part of every step.
      steps: how many.
      device_seconds: of a step, that each device computes on its own, and which vary.
      other_seconds: of a step, that all take together, as for gradient all-reduces.
      checkpoint_steps: from one checkpoint to the next; the last one is at the end.
    """

    devices: int
    steps: int
    device_seconds: float
    other_seconds: float
    checkpoint_steps: int

    @property
    def seconds(self) -> float:
        """The time on devices that are all alike and never fail, without checkpoints."""
        return self.steps * (self.device_seconds + self.other_seconds)


class JobTimes(NamedTuple):
    """Where the seconds of simulated jobs went, float64 [jobs].

    Attributes:
      steps: into steps that counted, on devices that are all alike.
      waiting: into waiting for the slowest device, in these.
      checkpoints: into checkpoints that counted.
      lost: into steps and checkpoints that a failure undid.
      restarts: from failures until steps were made again.
      failures: how many there were.
    """

    steps: np.ndarray
    waiting: np.ndarray
    checkpoints: np.ndarray
    lost: np.ndarray
    restarts: np.ndarray
    failures: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The seconds from start to end."""
        return self.steps + self.waiting + self.checkpoints + self.lost + self.restarts


def simulate_jobs(job: Job, conditions: Conditions, jobs: int = 200, seed: int = 0) -> JobTimes:
    """Returns how long some jobs of one kind took.

    Args:
      job: what there is to do.
      conditions: under which.
      jobs: how many times it is simulated.
      seed: of all that is drawn.

    Raises:
      UserError: if devices fail so often, or are so slow, that a job would hardly ever end.
    """
    _check_reached(job, conditions, conditions.restart_seconds, "to start again")
    seeds = np.random.SeedSequence(seed).spawn(jobs)
    rows = [_simulate(job, conditions, np.random.default_rng(own)) for own in seeds]
    return JobTimes(*np.array(rows, np.float64).T)


def _check_reached(job: Job, conditions: Conditions, seconds: float, what: str) -> None:
    """Raises UserError if so many seconds hardly ever pass without a failure."""
    rate = conditions.failure_rate(job.devices)
    if rate * seconds > _MOST_FAILURES:
        raise UserError(
            f"one of {job.devices:,} devices fails every {1 / rate:,.0f} s, and it takes "
            f"{seconds:,.0f} s {what}: hardly ever would that be reached"
        )


def _simulate(job: Job, conditions: Conditions, rng: np.random.Generator) -> tuple[float, ...]:
    """Returns the fields of :class:`JobTimes` of one job."""
    rate = conditions.failure_rate(job.devices)
    slow = rng.binomial(job.devices, conditions.slow_share)
    # Of the slowest device, by draws that leave those of the job as they are.
    factor = _slowest_of_all(job, conditions, slow, _QUANTILES, np.random.default_rng(0)).mean()
    interval = min(job.checkpoint_steps, job.steps) * (
        job.device_seconds * float(factor) + job.other_seconds
    )
    _check_reached(
        job,
        conditions,
        interval + conditions.checkpoint_seconds,
        "from one checkpoint to the next at the pace of the slowest",
    )
    waiting = checkpoints = lost = restarts = 0.0
    failures = done = 0
    while done < job.steps:
        count = min(job.checkpoint_steps, job.steps - done)
        factors = _slowest_of_all(job, conditions, slow, count, rng)
        own = job.device_seconds * float(factors.sum()) + job.other_seconds * count
        # Failures know no past: each attempt may draw the time of the next one anew.
        until_failure = rng.exponential(1 / rate) if rate else math.inf
        if until_failure < own + conditions.checkpoint_seconds:
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
    """Returns as :func:`_slowest` of all devices, so many of which are slow throughout."""
    factors = _slowest(job.devices - slow, conditions.jitter, steps, rng)
    if slow:
        of_slow = _slowest(slow, conditions.jitter, steps, rng)
        factors = np.maximum(factors, conditions.slow_factor * of_slow)
    return factors


def _slowest(devices: int, jitter: float, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the time of the slowest device in each step, float64 [steps].

    Not all devices' times are drawn: the slowest of n is below x with the n-th power of the
    probability that one is.
    """
    if not devices or not jitter:
        return np.full(steps, float(devices > 0))
    places, values = _quantiles_of_slowest(devices)
    return np.exp(jitter * np.interp(rng.random(steps), places, values))


@functools.lru_cache(maxsize=64)
def _quantiles_of_slowest(devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns probabilities, and the standard normal quantiles of the greatest of so many."""
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = statistics.NormalDist()
    return places, np.array([normal.inv_cdf(place ** (1 / devices)) for place in places])


def best_interval(checkpoint_seconds: float, failure_rate: float) -> float:
    """Returns the seconds of work from checkpoint to checkpoint that lose the least time.

    About ``sqrt(2 * checkpoint_seconds / failure_rate)`` (Young 1974); exactly, where the mean time
    of a part with its checkpoint, ``(e^(failure_rate * seconds) - 1) / failure_rate`` as failures
    undo it as a whole (Daly 2006), is least for each second of work.

    Args:
      checkpoint_seconds: for which a checkpoint stops the job.
      failure_rate: failures a second.
    """
    if not failure_rate:
        return math.inf
    if not checkpoint_seconds:
        return 0.0
    # Where the derivative is 0: (1 - x) e^x = e^(-rate * checkpoint), for x = rate * interval; the
    # left side falls from 1 at x = 0 to 0 at x = 1.
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        # log1p(-x) + x: what is left of both sides near 0 is small, and must not be rounded away.
        if math.log1p(-middle) + middle > -failure_rate * checkpoint_seconds:
            low = middle
        else:
            high = middle
    return low / failure_rate
