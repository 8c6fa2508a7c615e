"""Published schedules of pipelines, against closed forms."""

import pytest

from imagenet_fast.lab.planning.cost_model.pipeline import (
    simulate_zero_bubble,
    stored_micro_batches,
)
from imagenet_fast.pipeline_parallel.schedules import tasks


@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [(1, 4), (2, 8), (2, 32), (4, 4), (4, 8), (4, 32), (8, 8), (8, 32)],
)
@pytest.mark.parametrize("weights", [1.0, 0.5])
def test_zero_bubble(devices, micro_batches, weights):
    """ZB-H1 (Qi et al. 2023): a third of 1F1B's idle time, with the same activations."""
    found = simulate_zero_bubble(devices, micro_batches, weight_gradients=weights)
    idle = found.seconds - micro_batches * (2 + weights)
    assert idle == pytest.approx((devices - 1) * (2 - weights))
    ends = {interval[:3]: interval.end for interval in found.intervals}
    assert len(ends) == len(found.intervals) == 3 * devices * micro_batches
    for stage, number, kind, begin, _ in found.intervals:
        needed = {
            "forward": [(stage - 1, number, kind)] * (stage > 0),
            "backward": [(stage, number, "forward"), (stage + 1, number, kind)],
            "weights": [(stage, number, "backward")],
        }[kind]
        assert all(ends.get(task, 0.0) <= begin for task in needed)
    for stage in range(devices):
        row = [interval for interval in found.intervals if interval.stage == stage]
        assert all(one.end <= other.begin for one, other in zip(row, row[1:]))
        kinds = [interval.kind for interval in row]
        stored = [
            kinds[:end].count("forward") - kinds[:end].count("weights")
            for end in range(len(kinds) + 1)
        ]
        assert max(stored) <= devices


def test_stored_micro_batches():
    assert stored_micro_batches(tasks("gpipe", 4, 6), 4) == [6, 6, 6, 6]
    assert stored_micro_batches(tasks("1f1b", 4, 6), 4) == [4, 3, 2, 1]
    # Narayanan et al. 2021: 1 + (K - 1) / (K v) times those of 1F1B in the first device.
    stored = stored_micro_batches(tasks("interleaved_1f1b", 8, 8, 4), 4)
    assert stored == [5.5, 4.5, 3.5, 2.5]
