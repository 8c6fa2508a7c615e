"""Times that follow a run's duration."""

import pytest

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.scaled_times import scale_times


def epochs(amount):
    return Duration(amount, "epochs")


def test_a_ratio():
    assert scale_times(epochs(30), epochs(90), epochs(18)) == epochs(6)
    assert scale_times((epochs(8), epochs(11)), epochs(12), epochs(3)) == (epochs(2), epochs(2.75))
    assert scale_times(epochs(1), epochs(3), epochs(1)) == epochs(0.33333)


def test_other_units():
    steps, examples = Duration(1000, "steps"), Duration(3e6, "examples")
    # Of the same fraction of the run: by the durations' ratio, or in the new unit.
    assert scale_times(steps, epochs(40), epochs(20)) == Duration(500, "steps")
    assert scale_times(epochs(9), epochs(90), steps) == Duration(100, "steps")
    # A first knot of 0 is in the unit of the others.
    assert scale_times((epochs(0), epochs(9)), epochs(90), steps) == (
        Duration(0, "steps"),
        Duration(100, "steps"),
    )
    assert scale_times((epochs(30), epochs(60)), epochs(90), examples) == (
        Duration(1e6, "examples"),
        Duration(2e6, "examples"),
    )
    with pytest.raises(UserError, match="1000 steps of 90 epochs is no known fraction of 3000000"):
        scale_times(steps, epochs(90), examples)


def test_nothing_to_scale():
    assert scale_times((), epochs(90), epochs(1)) == ()
    assert scale_times(epochs(0), Duration(9, "steps"), epochs(1)) == epochs(0)
