"""Simulated pipelines, against closed forms and published numbers."""

import pytest

from imagenet_fast.lab.planning.cost_model.pipeline import ideal_bubble
from imagenet_fast.pipeline_parallel.schedules import tasks
from imagenet_fast.pipeline_parallel.simulation import (
    BlockCost,
    Interval,
    MicroBatchesInMemory,
    micro_batches_in_memory,
    simulate,
    stage_memory,
)


def cost(name="block", **sizes):
    return BlockCost(**{**dict.fromkeys(BlockCost._fields, 0), "name": name, **sizes})


def equal(order, stages, micro_batches, rematerialize, forward=1.0, backward=2.0):
    sequence = tasks(order, stages, micro_batches)
    return simulate(sequence, [forward] * stages, [backward] * stages, rematerialize=rematerialize)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 32])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_equal_stages_have_the_published_bubble(stages, micro_batches, order):
    found = equal(order, stages, micro_batches, "never")
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert found.bubble == pytest.approx(ideal_bubble(stages, micro_batches))
    assert found.seconds == pytest.approx((micro_batches + stages - 1) * 3)
    assert found.recomputed == 0


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 8), (4, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("each", [2, 3])
def test_interleaved_stages_have_the_published_bubble(devices, micro_batches, each):
    """Narayanan et al. 2021: (K - 1) / (v M) of the time without a bubble."""
    stages = devices * each
    found = simulate(
        tasks("interleaved_1f1b", stages, micro_batches, devices),
        [1 / each] * stages,
        [2 / each] * stages,
        rematerialize="never",
        devices=devices,
    )
    work = 3 * micro_batches
    assert found.seconds / work - 1 == pytest.approx((devices - 1) / (each * micro_batches))
    assert found.bubble == pytest.approx(ideal_bubble(devices, micro_batches, each))
    assert len(found.busy) == devices


@pytest.mark.parametrize("micro_batches", [1, 4, 32])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_time_with_recomputation(stages, micro_batches):
    """All forward, then all backward; the last stage recomputes all but the last micro-batch."""
    found = equal("gpipe", stages, micro_batches, "always")
    others = micro_batches + stages - 2
    assert found.seconds == pytest.approx(others * 1 + (micro_batches + stages - 1) * 3)
    passes = stages * micro_batches
    assert found.recomputed == pytest.approx((passes - 1) / (4 * passes - 1))


def test_recomputation_is_up_to_23_percent():
    """Huang et al. 2018, section 3."""
    assert equal("gpipe", 8, 32, "always").recomputed == pytest.approx(0.23, abs=0.02)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rematerialize", ["always", "except_last", "never"])
def test_one_device_recomputes_if_all_forward_passes_come_first(order, rematerialize):
    found = equal(order, 1, 5, rematerialize)
    again = 4 if order == "gpipe" and rematerialize != "never" else 0
    assert (found.seconds, found.bubble) == (15 + again, 0)
    assert found.recomputed == pytest.approx(again / (15 + again))


def test_each_interval():
    """Two stages, two micro-batches; the last one's activations are kept."""
    found = simulate(
        tasks("gpipe", 2, 2), [1, 2], [3, 4], transfer=[0.5], rematerialize="except_last"
    )
    assert sorted(found.intervals) == [
        Interval(0, 0, "backward", 17.0, 20.0),
        Interval(0, 0, "forward", 0.0, 1.0),
        Interval(0, 0, "recompute", 16.0, 17.0),
        Interval(0, 1, "backward", 10.0, 13.0),
        Interval(0, 1, "forward", 1.0, 2.0),
        Interval(1, 0, "backward", 11.5, 15.5),
        Interval(1, 0, "forward", 1.5, 3.5),
        Interval(1, 0, "recompute", 9.5, 11.5),
        Interval(1, 1, "backward", 5.5, 9.5),
        Interval(1, 1, "forward", 3.5, 5.5),
    ]
    assert found.busy == pytest.approx([(1 + 1 + 3 + 1 + 3) / 20, 14 / 20])


def test_passes_in_turn_wait_for_each_other():
    """1F1B: the first stage continues as soon as it gets a gradient."""
    found = simulate(tasks("1f1b", 2, 3), [1, 1], [2, 2], rematerialize="never")
    own = [(i.micro_batch, i.kind, i.begin) for i in found.intervals if i.stage == 0]
    assert own == [
        (0, "forward", 0),
        (1, "forward", 1),
        (0, "backward", 4),
        (2, "forward", 6),
        (1, "backward", 7),
        (2, "backward", 10),
    ]


@pytest.mark.parametrize(
    ("order", "rematerialize", "first", "second", "last"),
    [
        ("gpipe", "always", (32, 1), (32, 1), (32, 1)),
        ("gpipe", "except_last", (32, 1), (32, 1), (32, 1)),
        ("gpipe", "never", (32, 32), (32, 32), (32, 32)),
        # Of stage k of K, at most K - k are under way (Narayanan et al. 2020); one may be waiting.
        ("1f1b", "never", (4, 4), (4, 3), (2, 1)),
        ("1f1b", "always", (4, 1), (4, 1), (2, 1)),
        # The last one's are kept while those of others are computed once more.
        ("1f1b", "except_last", (4, 2), (4, 2), (2, 1)),
    ],
)
def test_micro_batches_in_memory(order, rematerialize, first, second, last):
    found = micro_batches_in_memory(tasks(order, 4, 32), rematerialize)
    assert found == [
        MicroBatchesInMemory(*first),
        MicroBatchesInMemory(*second),
        found[2],
        MicroBatchesInMemory(*last),
    ]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_no_stage_keeps_more_micro_batches_than_there_are(order):
    assert micro_batches_in_memory(tasks(order, 4, 1), "never") == [MicroBatchesInMemory(1, 1)] * 4
    assert micro_batches_in_memory(tasks(order, 1, 1), "always") == [MicroBatchesInMemory(1, 1)]


@pytest.mark.parametrize(
    ("parameters", "gib"),
    [(81_505_540, 0.91), (542_734_840, 6.07), (1_844_858_344, 20.62)],
)
def test_published_memory_of_weights(parameters, gib):
    """12 bytes per parameter with RMSProp, as torchgpipe reports for the paper's networks."""
    own = cost(parameters=parameters, parameter_bytes=4 * parameters)
    memory = stage_memory(own, MicroBatchesInMemory(1, 1), 2)
    assert (memory.weights + memory.slots) / 2**30 == pytest.approx(gib, abs=0.005)
    assert memory.gradients == 4 * parameters


def test_memory_of_a_stage():
    own = cost(parameter_bytes=1000, other_bytes=10, input_bytes=7, activation_bytes=300)
    memory = stage_memory(own, MicroBatchesInMemory(5, 2), 1.5)
    assert memory == (1010, 1000, 1500, 35, 600)
    assert memory.total == 4145


def test_consecutive_blocks():
    one = cost(
        "one",
        forward=1,
        backward=2,
        parameters=5,
        parameter_bytes=20,
        other_bytes=8,
        input_bytes=100,
        needed_input_bytes=100,
        output_bytes=50,
        needed_output_bytes=30,
        activation_bytes=70,
    )
    two = cost(
        "two",
        forward=10,
        backward=20,
        parameters=50,
        parameter_bytes=200,
        input_bytes=50,
        needed_input_bytes=50,
        output_bytes=6,
        activation_bytes=9,
    )
    both = one.followed_by(two)
    assert both == cost(
        "one .. two",
        forward=11,
        backward=22,
        parameters=55,
        parameter_bytes=220,
        other_bytes=8,
        input_bytes=100,
        needed_input_bytes=100,
        output_bytes=6,
        # Of the 50 between, the 30 that both need are kept once.
        activation_bytes=70 + 20 + 9,
    )
    three = cost("three", needed_input_bytes=6)
    assert both.followed_by(three) == one.followed_by(two.followed_by(three))
    assert both.followed_by(three).name == "one .. three"
