"""Times that follow a run's duration."""

from imagenet_fast.base.durations import Duration
from imagenet_fast.optimizers.scaled_times import scale_times


def epochs(amount):
    return Duration(amount, "epochs")


def test_a_ratio():
    assert scale_times(epochs(30), epochs(90), epochs(18)) == epochs(6)
    assert scale_times((epochs(8), epochs(11)), epochs(12), epochs(3)) == (epochs(2), epochs(2.75))
    assert scale_times(epochs(1), epochs(3), epochs(1)) == epochs(0.33333)


def test_other_units_stay():
    steps = Duration(1565, "steps")
    assert scale_times(steps, epochs(42), epochs(20)) == steps
    assert scale_times(epochs(5), epochs(90), steps) == epochs(5)
    assert scale_times((), epochs(90), epochs(1)) == ()
