"""Gradient segments: schedules by hand, and the best ones against brute force."""

import itertools

import numpy as np
import pytest

from imagenet_fast import UserError
from imagenet_fast.lab.planning.cost_model.fusion import best_segments, few_segments, transfers


def alpha_beta(alpha, beta):
    return lambda size: alpha + beta * size


def finish(known, sizes, cost, segments):
    return transfers(known, sizes, cost, segments)[-1].end


def all_cuts(tensors):
    for count in range(tensors):
        yield from itertools.combinations(range(1, tensors), count)


def test_times_by_hand():
    """The last layer's sum waits for its gradient, the first's for the last's."""
    known, sizes = [6.0, 4.0, 1.0], [10, 20, 30]
    found = transfers(known, sizes, alpha_beta(1.0, 0.1), (1, 2))
    assert [(own.first, own.last) for own in found] == [(2, 2), (1, 1), (0, 0)]
    assert [(own.begin, own.end) for own in found] == [(1, 5), (5, 8), (8, 10)]
    (whole,) = transfers(known, sizes, alpha_beta(1.0, 0.1))
    assert (whole.first, whole.last, whole.begin, whole.end) == (0, 2, 6.0, 13.0)


def test_a_segment_waits_for_its_latest_gradient():
    """Even if that is not its first, as where a network branches."""
    (whole,) = transfers([1.0, 5.0], [1, 1], alpha_beta(0.0, 0.0))
    assert whole.begin == 5.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 5.0])
def test_none_is_better(seed, alpha):
    rng = np.random.default_rng(seed)
    sizes = rng.exponential(1.0, 8)
    known = rng.exponential(0.5, 8)[::-1].cumsum()[::-1]
    cost = alpha_beta(alpha, 0.4)
    times = {cuts: finish(known, sizes, cost, cuts) for cuts in all_cuts(8)}
    found = best_segments(known, sizes, cost)
    assert times[found] == pytest.approx(min(times.values()), rel=1e-12)
    for count in (1, 2, 3, 8):
        cuts = best_segments(known, sizes, cost, count)
        assert len(cuts) == count - 1
        assert times[cuts] == pytest.approx(
            min(own for other, own in times.items() if len(other) == count - 1), rel=1e-12
        )


def test_few_segments_waste_little():
    rng = np.random.default_rng(0)
    sizes = rng.exponential(1.0, 20)
    known = rng.exponential(0.5, 20)[::-1].cumsum()[::-1]
    cost = alpha_beta(0.01, 0.4)
    best = best_segments(known, sizes, cost)
    end = finish(known, sizes, cost, best)
    found = few_segments(known, sizes, cost, 0.1)
    assert len(found) < len(best)
    assert finish(known, sizes, cost, found) <= end + 0.1
    fewer = best_segments(known, sizes, cost, len(found))
    assert finish(known, sizes, cost, fewer) > end + 0.1
    assert finish(known, sizes, cost, few_segments(known, sizes, cost, 0.0)) == end


def test_no_more_segments_than_needed():
    """Where sums take no longer together, one is as good as many."""
    assert best_segments([0.0] * 5, [1.0] * 5, alpha_beta(0.0, 1.0)) == ()


def test_latency_joins_and_bandwidth_cuts():
    known = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert best_segments(known, [1.0] * 5, alpha_beta(100.0, 0.1)) == ()
    assert best_segments(known, [1.0] * 5, alpha_beta(0.0, 1.0)) == (1, 2, 3, 4)


def test_refusals():
    with pytest.raises(UserError, match="must increase and lie between 1 and 2"):
        transfers([0.0] * 3, [1.0] * 3, alpha_beta(0, 1), (2, 2))
    with pytest.raises(UserError, match="end after 3"):
        transfers([0.0] * 3, [1.0] * 3, alpha_beta(0, 1), (3,))
    with pytest.raises(UserError, match="cannot be cut into 4"):
        best_segments([0.0] * 3, [1.0] * 3, alpha_beta(0, 1), 4)
