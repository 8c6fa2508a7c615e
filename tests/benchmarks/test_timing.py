import itertools

import pytest

from imagenet_fast.benchmarks import timing


def test_turns_alternate_and_warm_up_is_not_counted(monkeypatch):
    clock, cpu = itertools.count(), itertools.count(0, 10)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(cpu))
    calls = []

    def ours():
        calls.append("ours")
        # Slow at first, as when a function is compiled.
        for _ in range(100 if len(calls) <= 2 else 2):
            next(clock)
        next(cpu)

    times = timing.take_turns(ours, lambda: calls.append("theirs"), warmup=1, repeats=3)
    assert calls == ["ours", "theirs"] * 4
    assert times == (
        timing.Times((3, 3, 3), (20, 20, 20)),
        timing.Times((1, 1, 1), (10, 10, 10)),
    )


def test_the_ratio_is_of_pairs():
    # The machine is slow in the second pair; ours takes half of the time in each.
    ours = timing.Times((1.0, 5.0, 2.0), (1.0, 1.0, 1.0))
    theirs = timing.Times((2.0, 10.0, 5.0), (4.0, 2.0, 1.0))
    comparison = timing.Comparison("title", (), ("ours", "theirs"), (ours, theirs), images=20)
    assert comparison.ratio == timing.Spread(0.5, 0.4, 0.5)
    assert comparison.cpu_ratio == timing.Spread(0.5, 0.25, 1.0)
    assert comparison.images_per_second(0) == timing.Spread(10.0, 4.0, 20.0)
    assert comparison.images_per_second(1) == timing.Spread(4.0, 2.0, 10.0)
    assert comparison.repeats == 3


@pytest.mark.parametrize(
    ("values", "median"), [((3.0,), 3.0), ((1.0, 2.0), 1.5), ((9.0, 1.0, 2.0), 2.0)]
)
def test_spread(values, median):
    assert timing.Spread.of(values) == timing.Spread(median, min(values), max(values))
