"""Sums over groups of replicas, and errors where they are unsupported."""

import pathlib

import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import consecutive

JOB = pathlib.Path(__file__).with_name("group_sum_job.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "logical_cpus", "workers"),
    [pytest.param("mirrored", 4, 0, marks=pytest.mark.long), ("multi_worker", 0, 4)],
    ids=["devices", "workers"],
)
def test_sums_and_gradients(run_python, kind, logical_cpus, workers):
    run_python([JOB, kind, logical_cpus], workers=workers)


def test_a_group_of_one():
    tensor = tf.constant([1.0, 2.0])
    assert group_sum(tensor, consecutive(8, 1), "test") is tensor


def test_tpu_group_sum_and_gradient(monkeypatch):
    strategy = object.__new__(tf.distribute.TPUStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)

    @tf.function
    def traced(tensor):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            total = tf.square(group_sum(tensor, consecutive(4, 2), "test"))
        return tape.gradient(total, tensor)

    graph = traced.get_concrete_function(tf.TensorSpec([3])).graph
    sums = [op for op in graph.get_operations() if op.type == "CrossReplicaSum"]
    assert len(sums) == 2
    for op in sums:
        assert tf.get_static_value(op.inputs[1]).tolist() == [[0, 1], [2, 3]]


def test_unsupported_strategies(monkeypatch):
    strategy = object.__new__(tf.distribute.experimental.CentralStorageStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(
        UserError, match="test: CentralStorageStrategy does not support sums over groups"
    ):
        group_sum(tf.constant(1.0), consecutive(4, 2), "test")


UNSUPPORTED_PLACES = """
import pytest
import tensorflow as tf
from imagenet_fast import Config, UserError, make_strategy
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import consecutive

strategy = make_strategy(Config(logical_cpus=2, batch_size=2))

def own_sum():
    return group_sum(tf.constant(1.0), consecutive(2, 2), "test")

def in_a_function():
    return tf.function(own_sum)()

def in_a_loop():
    body = lambda step, total: (step + 1, total + own_sum())
    return tf.while_loop(lambda step, _: step < 3, body, (tf.constant(0), tf.constant(0.0)))

def in_a_branch():
    return tf.cond(tf.random.uniform([]) < 0.5, own_sum, lambda: tf.constant(0.0))

for place in (in_a_function, in_a_loop, in_a_branch):
    with pytest.raises(UserError, match="test: .* inside a tf.while_loop, a tf.cond or a nested"):
        tf.function(lambda: strategy.run(place), autograph=False)()
assert tf.function(lambda: strategy.run(own_sum))().values[1].numpy() == 2
"""


@pytest.mark.slow
def test_places_that_mirrored_replicas_do_not_support(run_python):
    run_python(["-c", UNSUPPORTED_PLACES])
