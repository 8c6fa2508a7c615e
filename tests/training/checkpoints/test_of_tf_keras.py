"""Checkpoints with the names of objects that tf_keras gave them, and other files of version 0.1."""

import pathlib
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError, build_model, models, read_config, train
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.training.build.model import build_for_evaluation
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.of_tf_keras import (
    is_of_tf_keras,
    shadows_of_tf_keras,
    weights_of_tf_keras,
)
from imagenet_fast.training.run import make_run

DATA = pathlib.Path(__file__).parent / "data"
# What data/make_version_0_1.py has printed.
PROBABILITIES = [
    [0.33182165026664734, 0.33358559012413025, 0.3345927894115448],
    [0.33255624771118164, 0.33383944630622864, 0.33360427618026733],
]
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a run, its export, and its model in a .keras file and a SavedModel."""
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(DATA / "version_0_1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def restored(saved):
    model = build_for_evaluation(make_run(read_config(str(saved / "run"))))
    restore_weights(model, str(saved / "run"))
    return model


def test_a_run_of_version_0_1_is_evaluated_as_there(restored):
    images = np.arange(2 * 16 * 16 * 3).reshape(2, 16, 16, 3) % 251
    found = restored.predict(images.astype("uint8"), verbose=0)
    np.testing.assert_allclose(found, PROBABILITIES, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["run", "export", "model.keras", "saved"])
def test_initial_weights_of_version_0_1(saved, restored, name):
    path = str(saved / name)
    config = read_config(str(saved / "run")).replace(model_dir="", initial_weights=path)
    model = build_model(config)
    head = name_of(models.head(models.network_of(model)).kernel)
    with restored.averaged_weights():
        for found, expected in zip(model.weights, restored.weights):
            same = np.array_equal(found, expected)
            # The others do not have the names of the classes.
            assert same == (name in ("run", "export") or name_of(found) != head), name_of(found)


def test_a_run_of_version_0_1_is_not_resumed(saved):
    config = read_config(str(saved / "run"))
    with pytest.raises(UserError, match=r"the version that began it \(imagenet_fast 0\.1\)"):
        train(config)
