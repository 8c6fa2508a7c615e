"""Checkpoints with the names of objects that tf_keras gave them."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.training.checkpoints.of_tf_keras import (
    is_of_tf_keras,
    shadows_of_tf_keras,
    weights_of_tf_keras,
)

NAMES = ["late/kernel", "early/kernel", "early/bias"]


def node(**children):
    made = tf.train.Checkpoint()
    for name, child in children.items():
        setattr(made, name, child)
    return made


@pytest.fixture
def path(tmp_path):
    """Layer 2 comes before layer 10, which a model of today lists first."""
    late = node(kernel=tf.Variable([1.0], name="late/kernel"))
    early = node(
        kernel=tf.Variable([2.0], name="early/kernel"), bias=tf.Variable([3.0], name="early/bias")
    )
    layers = {"layer_with_weights-10": late, "layer_with_weights-2": early}
    averages = [tf.Variable([value]) for value in (20.0, 30.0, 10.0)]
    saved = node(model=node(**layers), weight_averages=averages)
    return saved.write(str(tmp_path / "ckpt-1"))


def test_weights_by_name(path):
    assert is_of_tf_keras(path)
    np.testing.assert_array_equal(weights_of_tf_keras(path, NAMES), [[1], [2], [3]])
    with pytest.raises(ValueError, match="it has no other/kernel"):
        weights_of_tf_keras(path, ["other/kernel"])


def test_averages_in_the_order_of_tf_keras(path):
    found = shadows_of_tf_keras(path, "weight_averages", NAMES)
    np.testing.assert_array_equal(found, [[10], [20], [30]])
    with pytest.raises(ValueError, match="it has no slow_weights of early/kernel"):
        shadows_of_tf_keras(path, "slow_weights", NAMES)


def test_checkpoints_of_today_and_no_checkpoint(tmp_path):
    path = tf.train.Checkpoint(weights=[tf.Variable(1.0)]).write(str(tmp_path / "ckpt-1"))
    assert not is_of_tf_keras(path)
    assert not is_of_tf_keras(str(tmp_path / "ckpt-2"))
