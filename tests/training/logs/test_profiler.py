"""At which steps the profiler records; what it writes is looked at in test_train.py."""

import pytest
import tensorflow as tf

from imagenet_fast.training.logs.profiler import Profiler


@pytest.fixture
def calls(monkeypatch):
    """What the profiler is told, and when."""
    calls = []
    profiler = tf.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder: calls.append(f"start in {folder}"))
    monkeypatch.setattr(profiler, "stop", lambda: calls.append("stop"))
    return calls


def run(calls, first, last, begin, end):
    profiler = Profiler("folder", first, last)
    for step in range(begin, end):
        profiler.before_steps(step)
        calls.append(step + 1)
        profiler.after_steps(step + 1)
    profiler.close()
    return calls


def test_from_the_first_to_the_last_step(calls):
    assert run(calls, 3, 4, 0, 6) == [1, 2, "start in folder", 3, 4, "stop", 5, 6]


def test_a_single_step(calls):
    assert run(calls, 1, 1, 0, 2) == ["start in folder", 1, "stop", 2]


def test_a_run_that_resumes_in_the_range_profiles_the_rest(calls):
    assert run(calls, 3, 6, 4, 7) == ["start in folder", 5, 6, "stop", 7]


def test_a_run_that_resumes_after_the_range_profiles_nothing(calls):
    assert run(calls, 3, 6, 6, 8) == [7, 8]


def test_a_run_that_ends_before_the_last_step(calls):
    assert run(calls, 2, 6, 0, 3) == [1, "start in folder", 2, 3, "stop"]
