"""Simulated jobs, against probability theory."""

import dataclasses
import math

import numpy as np
import pytest

from imagenet_fast import UserError
from imagenet_fast.lab.planning.cost_model.reliability import (
    Conditions,
    Job,
    best_interval,
    simulate_jobs,
)


def mean_is(values, expected, deviations=4.0):
    """Whether the mean of a sample is within a few standard errors of its expectation."""
    error = values.std(ddof=1) / math.sqrt(len(values))
    return abs(values.mean() - expected) < deviations * error


def expected_seconds(work, failure_rate, restart_seconds):
    """The mean time of work that a failure undoes as a whole, as it does restarts.

    J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps".
    """
    return math.exp(failure_rate * restart_seconds) * math.expm1(failure_rate * work) / failure_rate


def test_reliable_devices():
    job = Job(devices=4096, steps=100, device_seconds=0.02, other_seconds=0.01, checkpoint_steps=30)
    times = simulate_jobs(job, Conditions(checkpoint_seconds=2.0), jobs=3)
    np.testing.assert_allclose(times.total, 100 * 0.03 + 4 * 2.0)
    np.testing.assert_array_equal(times.waiting, 0)


@pytest.mark.parametrize("devices", [1, 8, 1024])
def test_steps_wait_for_the_slowest(devices):
    """Against times drawn for each device."""
    job = Job(devices, steps=50, device_seconds=1.0, other_seconds=0.5, checkpoint_steps=50)
    times = simulate_jobs(job, Conditions(jitter=0.1), jobs=400)
    rng = np.random.default_rng(7)
    drawn = np.exp(0.1 * rng.standard_normal((4000, devices)).max(axis=1))
    error = 50 * drawn.std() / math.sqrt(len(drawn))
    assert abs(times.total.mean() - 50 * (drawn.mean() + 0.5)) < 4 * error
    assert times.waiting.mean() == pytest.approx(times.total.mean() - 75)


def test_more_devices_wait_longer():
    def waiting(devices):
        job = Job(devices, steps=200, device_seconds=1.0, other_seconds=0.0, checkpoint_steps=200)
        return simulate_jobs(job, Conditions(jitter=0.05), jobs=50).waiting.mean()

    assert waiting(1) < waiting(8) < waiting(256) < waiting(4096)


def test_one_slow_device_slows_all():
    job = Job(devices=256, steps=10, device_seconds=1.0, other_seconds=0.0, checkpoint_steps=10)
    times = simulate_jobs(job, Conditions(slow_fraction=1 / 256, slow_factor=1.5), jobs=2000)
    assert set(np.round(times.total, 6)) == {10.0, 15.0}
    assert mean_is(times.total > 12, 1 - (1 - 1 / 256) ** 256)


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 1e-2])
def test_failures_cost_what_daly_says(rate):
    """A checkpoint every 100 steps of one second; restarts can fail, too."""
    job = Job(devices=8, steps=500, device_seconds=0.6, other_seconds=0.4, checkpoint_steps=100)
    conditions = Conditions(
        hours_between_failures=8 / rate / 3600, restart_seconds=40.0, checkpoint_seconds=5.0
    )
    assert conditions.failure_rate(8) == pytest.approx(rate)
    times = simulate_jobs(job, conditions, jobs=4000)
    assert mean_is(times.total, 5 * expected_seconds(105.0, rate, 40.0))
    assert mean_is(times.failures, rate * times.total.mean())
    np.testing.assert_allclose(times.checkpoints, 25.0)


def test_rare_checkpoints_lose_more_work():
    def lost(steps):
        job = Job(
            devices=64, steps=1000, device_seconds=1.0, other_seconds=0.0, checkpoint_steps=steps
        )
        return simulate_jobs(job, Conditions(hours_between_failures=10), jobs=400).lost.mean()

    assert lost(10) < lost(100) < lost(1000)


@pytest.mark.parametrize(("checkpoint", "rate"), [(1.0, 1e-6), (30.0, 1e-4), (60.0, 1e-2)])
def test_best_interval_is_best(checkpoint, rate):
    interval = best_interval(checkpoint, rate)

    def cost(work):
        return expected_seconds(work + checkpoint, rate, 0.0) / work

    assert cost(interval) <= cost(0.95 * interval)
    assert cost(interval) <= cost(1.05 * interval)
    if rate * checkpoint < 1e-4:  # Young's formula is for these
        assert interval == pytest.approx(math.sqrt(2 * checkpoint / rate), rel=0.01)


def test_intervals_without_a_choice():
    assert best_interval(10.0, 0.0) == math.inf
    assert best_interval(0.0, 1e-3) == 0.0


def test_the_same_seed_gives_the_same_jobs():
    job = Job(devices=64, steps=100, device_seconds=1.0, other_seconds=0.0, checkpoint_steps=10)
    conditions = Conditions(jitter=0.1, hours_between_failures=1)
    one, same, other = (simulate_jobs(job, conditions, 5, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.total, same.total)
    assert (one.total != other.total).all()


def test_refusals():
    with pytest.raises(UserError, match="jitter is -1"):
        Conditions(jitter=-1.0)
    with pytest.raises(UserError, match="slow_fraction is 2"):
        Conditions(slow_fraction=2.0)
    with pytest.raises(UserError, match="hours_between_failures is 0, but must be positive"):
        Conditions(hours_between_failures=0.0)


def test_what_would_never_end_is_refused():
    job = Job(devices=4096, steps=100, device_seconds=10.0, other_seconds=0.0, checkpoint_steps=100)
    with pytest.raises(UserError, match=r"fails every 88 s.*1,000 s from one checkpoint"):
        simulate_jobs(job, Conditions(hours_between_failures=100))
    with pytest.raises(UserError, match="9,000 s to start again"):
        simulate_jobs(job, Conditions(hours_between_failures=1000, restart_seconds=9000))


@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [
        ({"slow_fraction": 0.5, "slow_factor": 15.0}, r"54,000"),
        ({"jitter": 1.0}, r"\d\d,\d\d\d"),
        ({"jitter": 1.0, "slow_fraction": 0.01, "slow_factor": 15.0}, r"\d\d\d,\d\d\d"),
    ],
)
def test_slow_devices_that_would_never_end_are_refused(trouble, seconds):
    """With equal devices, about every third attempt would complete an hour."""
    job = Job(
        devices=1024, steps=3600, device_seconds=1.0, other_seconds=0.0, checkpoint_steps=3600
    )
    conditions = Conditions(hours_between_failures=1024, restart_seconds=0.0)
    assert simulate_jobs(job, conditions, jobs=3).failures.mean() < 20
    with pytest.raises(UserError, match=f"fails every 3,600 s, and it takes {seconds} s from one"):
        simulate_jobs(job, dataclasses.replace(conditions, **trouble), jobs=3)
