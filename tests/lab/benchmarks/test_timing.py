import functools
import itertools

import pytest

from imagenet_fast.lab.benchmarks import timing


def test_the_times_of_a_call(monkeypatch):
    clock, cpu = itertools.count(), itertools.count(0, 10)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(cpu))

    def call():
        next(clock), next(clock)
        next(cpu)

    assert timing.timed(call)() == (3, 20)
    assert timing.timed(lambda: None)() == (1, 10)


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_calls_alternate_and_warmup_is_dropped(names):
    calls = []

    def call(name):
        # Slow at first, as when a function is compiled.
        calls.append(name)
        turn = calls.count(name)
        return (100.0 if turn <= 2 else turn + ord(name)), 10.0 * turn

    times = timing.time_interleaved(
        [functools.partial(call, name) for name in names], warmup=2, repeats=3
    )
    assert "".join(calls) == names * 5
    assert times == tuple(
        timing.Times(tuple(turn + ord(name) for turn in (3, 4, 5)), (30.0, 40.0, 50.0))
        for name in names
    )


def test_ratios_pair_the_repeats():
    # The machine is slow in the second turn; ours takes half of their time in each.
    ours = timing.Times((1.0, 5.0, 2.0), (1.0, 1.0, 1.0))
    theirs = timing.Times((2.0, 10.0, 5.0), (4.0, 2.0, 1.0))
    third = timing.Times((1.0, 5.0, 1.0), (0.5, 0.5, 0.5))
    names = ("ours", "theirs", "third")
    comparison = timing.Comparison("title", (), names, (ours, theirs, third), images=20)
    assert comparison.ratios == {
        "theirs": timing.Spread(0.5, 0.4, 0.5),
        "third": timing.Spread(1.0, 1.0, 2.0),
    }
    assert comparison.cpu_ratios == {
        "theirs": timing.Spread(0.5, 0.25, 1.0),
        "third": timing.Spread(2.0, 2.0, 2.0),
    }
    assert comparison.images_per_second(0) == timing.Spread(10.0, 4.0, 20.0)
    assert comparison.images_per_second(1) == timing.Spread(4.0, 2.0, 10.0)
    assert comparison.repeats == 3


@pytest.mark.parametrize(
    ("values", "median"), [((3.0,), 3.0), ((1.0, 2.0), 1.5), ((9.0, 1.0, 2.0), 2.0)]
)
def test_spread(values, median):
    assert timing.Spread.of(values) == timing.Spread(median, min(values), max(values))
