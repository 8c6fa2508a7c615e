"""The comparison with one device; test_compiled_steps.py runs the steps."""

import types

import numpy as np
import pytest
from small_config import SMALL

from imagenet_fast import Config, UserError, build_model
from imagenet_fast.lab.xla_compile.compare import (
    Batches,
    Reference,
    differences,
    reference_order,
    require_comparable,
)


def groups_of(order, accumulation_steps, number):
    """Returns the images of each ghost group of each micro-batch."""
    return [
        [set(part[group::number]) for group in range(number)]
        for part in order.reshape(accumulation_steps, -1)
    ]


def test_groups_of_replicas_are_ghost_groups_of_one_device():
    # Four replicas of six images, pairs of which take statistics together.
    order = reference_order(4, 6, accumulation_steps=1, group=2, parts=1)
    assert groups_of(order, 1, 2) == [[set(range(12)), set(range(12, 24))]]


def test_micro_batches_of_replicas_are_those_of_one_device():
    order = reference_order(4, 6, accumulation_steps=3, group=2, parts=1)
    assert groups_of(order, 3, 2)[1] == [{2, 3, 8, 9}, {14, 15, 20, 21}]


def test_parts_of_a_replica_s_images():
    order = reference_order(2, 6, accumulation_steps=1, group=1, parts=3)
    # A replica takes image n for part n modulo 3, too.
    assert groups_of(order, 1, 6) == [[{0, 3}, {1, 4}, {2, 5}, {6, 9}, {7, 10}, {8, 11}]]


def test_random_batches():
    config = Config(synthetic=True, num_classes=5, batch_size=8, image_size=4, seed=3)
    one, same = (Batches.random(config, replicas=4, steps=2, classes=5) for _ in range(2))
    assert one.images.shape == (2, 4, 2, 4, 4, 3)
    assert one.labels.shape == (2, 4, 2)
    np.testing.assert_array_equal(one.images, same.images)
    assert set(np.unique(one.labels)) <= set(range(5))


class Variable:
    def __init__(self, name):
        self.name = name

    def ref(self):
        return self.name


@pytest.mark.parametrize(
    ("precision", "dtype", "share", "wrong"),
    [
        ("float32", "float32", 1e-5, False),
        ("float32", "float32", 1e-3, True),
        ("mixed_bfloat16", "float32", 1e-3, False),
        ("float32", "bfloat16", 1e-3, False),
        ("mixed_bfloat16", "float32", 0.5, True),
    ],
)
def test_differences_explained_by_rounding(precision, dtype, share, wrong):
    config = Config(precision=precision, all_reduce_dtype=dtype)
    step = types.SimpleNamespace(arguments=("images", Variable("a"), Variable("b"), Variable("c")))
    reference = Reference({}, {"a": "weights", "b": "weights", "c": "optimizer"})
    own = {"most": 0.1, "spread": 0.0, "way": 8.0, "start": 8.0}
    found = {
        "1": {**own, "difference": 16 * share**2},
        "2": {**own, "difference": 0.0, "most": 0.2, "spread": 0.05},
        "3": {**own, "difference": 0.0},
    }
    weights, optimizer = differences(config, step, reference, found)
    assert (weights.kind, weights.most, weights.spread) == ("weights", 0.2, 0.05)
    assert weights.share == pytest.approx(share)
    assert bool(weights.wrong) == wrong
    assert not optimizer.wrong


def test_muon_rounds_to_bfloat16():
    step = types.SimpleNamespace(arguments=(Variable("a"),))
    found = {"0": {"most": 0, "spread": 0, "way": 1.0, "start": 1.0, "difference": 1e-6}}
    reference = Reference({}, {"a": "weights"})
    for optimizer, is_wrong in (("sgd", True), ("muon", False)):
        (own,) = differences(Config(optimizer=optimizer), step, reference, found)
        assert bool(own.wrong) == is_wrong


def test_rounding_of_weights_that_move_little():
    step = types.SimpleNamespace(arguments=(Variable("a"),))
    found = {"0": {"most": 0, "spread": 0, "way": 4e-10, "start": 1.0, "difference": 1e-12}}
    (own,) = differences(Config(), step, Reference({}, {"a": "weights"}), found)
    assert own.share == pytest.approx(0.05)
    assert not own.wrong


@pytest.mark.parametrize("way", [0.0, 1e-12, 9e-11])
def test_constant_weights_cannot_be_compared(way):
    # Replicas that do not move either would else be as right as can be.
    step = types.SimpleNamespace(arguments=(Variable("a"), Variable("b")))
    reference = Reference({}, {"a": "weights", "b": "metrics"})
    moving = {"most": 0, "spread": 0, "way": 1.0, "start": 0.0, "difference": 0.0}
    still = {**moving, "way": way, "start": 1.0}
    weights, metrics = differences(Config(), step, reference, {"0": still, "1": moving})
    assert weights.wrong.startswith("the reference's weights changed by only ")
    assert "too little to compare; take more steps, or use a higher" in weights.wrong
    assert not metrics.wrong


@pytest.mark.parametrize(
    ("options", "replicas", "message"),
    [
        ({"dropout": 0.5, "model": "alexnet_bn", "image_size": 64}, 8, "use --dropout=0"),
        ({"mixup_alpha": 0.2}, 8, "leave out mixup_alpha and cutmix_alpha"),
        ({}, 2048, "run_on_cpu supports up to 64 replicas, not 2,048: use a smaller topology"),
    ],
)
def test_options_that_one_device_cannot_reproduce(options, replicas, message):
    config = SMALL.replace(**options)
    with pytest.raises(UserError, match=message):
        require_comparable(config, build_model(config), replicas)
