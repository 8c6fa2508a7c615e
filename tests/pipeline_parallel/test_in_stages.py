"""Models whose weights are on the devices of their stages, and else as ever."""

from __future__ import annotations

import json
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages

JOB = pathlib.Path(__file__).with_name("in_stages_job.py")
layers = keras.layers
# Two names of the one device that there is.
DEVICES = ["/CPU:0", "/device:CPU:0"]


@pytest.fixture(scope="module")
def found(tmp_path_factory, run_python_session):
    path = tmp_path_factory.mktemp("in_stages") / "out.json"
    run_python_session([JOB, path])
    return json.loads(path.read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "amoebanet", "half", "unnamed"])
def test_each_weight_is_on_its_device_and_as_it_is_without_stages(found, name):
    case = found[name]
    places = [stage for stage, count in enumerate(case["balance"]) for _ in range(count)]
    assert len(case["devices"]) == len(places)
    for own, place in zip(case["devices"], places):
        assert own in ([], [place])
    assert {place for own in case["devices"] for place in own} >= {0, 3}
    assert case["equal"]
    assert case["weights"] > 7
    assert case["random numbers"]
    assert case["dtypes"] == ["float32"]


@pytest.mark.long
def test_balances(found):
    assert found["amoebanet"]["balance"] == [1, 2, 3, 5]
    assert found["half"]["balance"][:3] == [1, 1, 1]
    assert max(found["resnet"]["balance"]) - min(found["resnet"]["balance"]) <= 1


@pytest.mark.long
def test_blocks_that_were_built_on_another_device(found):
    told = (
        r"second/kernel:0 is on .*CPU:1, but its stage is on .*CPU:2: give the pipeline blocks th"
    )
    assert re.match(told, found["misplaced"])


def make(units=(3, 4, 2), name="dense{}"):
    inputs = values = keras.Input([5])
    for number, own in enumerate(units):
        values = layers.Dense(own, name=name.format(number))(values)
    return keras.Model(inputs, values, name="plain")


def test_the_model_is_that_of_the_blocks():
    model, blocks, balance = build_in_stages(make, DEVICES)
    assert model.name == "plain"
    assert [block.name for block in blocks] == ["dense0", "dense1", "dense2"]
    assert sum(balance) == 3
    images = values = tf.ones([2, 5])
    for block in blocks:
        values = block(values)
    np.testing.assert_allclose(values, model(images), rtol=1e-6)


def test_the_balance_may_follow_from_blocks_that_take_no_memory():
    def balance(blocks):
        balance.sizes = [tf.size(block.variables[0].read_value()).numpy() for block in blocks]
        balance.counts = [block.count_params() for block in blocks]
        return [2, 1]

    _, _, found = build_in_stages(lambda: make((3000, 3, 2)), DEVICES, balance)
    assert found == [2, 1]
    assert balance.counts == [18_000, 9_003, 8]
    assert balance.sizes == [0, 0, 6]


@pytest.mark.parametrize(
    ("balance", "told"),
    [
        ([1, 1], r"balance \[1, 1\] is of 2 blocks, but there are 3"),
        (lambda blocks: [3], r"balance \[3\] has 1 stages, but there are 2"),
    ],
)
def test_balances_that_are_none(balance, told):
    with pytest.raises(UserError, match=told):
        build_in_stages(make, DEVICES, balance)


def test_more_stages_than_blocks():
    with pytest.raises(UserError, match="3 blocks cannot be split into 4 stages"):
        build_in_stages(make, DEVICES * 2)


def test_what_cannot_be_cut():
    with pytest.raises(UserError, match="a Dense cannot be cut into blocks"):
        build_in_stages(lambda: layers.Dense(3), DEVICES)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"name": "a{}"}, {"name": "b{}"}, "a0/kernel:0 and then b0/kernel:0"),
        ({"units": [3, 2]}, {"units": [3, 2, 1]}, ".* and then dense2/kernel:0"),
        ({"units": [3, 2, 1]}, {"units": [3, 2]}, "dense2/kernel:0 and then .*"),
    ],
)
def test_a_model_that_is_another_one_each_time(first, second, told):
    options = iter([first, second])
    with pytest.raises(UserError, match=f"others each time that it is made: {told}"):
        build_in_stages(lambda: make(**next(options)), DEVICES)


@pytest.mark.parametrize("more_at", [0, 1])
def test_a_weight_that_is_made_only_once(more_at):
    calls = []

    def other():
        model = make()
        if len(calls) == more_at:
            model.extra = tf.Variable(1.0, name="extra")
        calls.append(model)
        return model

    told = ("extra:0 and then none", "none and then extra:0")[more_at]
    with pytest.raises(UserError, match=told):
        build_in_stages(other, DEVICES)
