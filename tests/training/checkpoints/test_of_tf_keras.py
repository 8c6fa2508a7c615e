"""Checkpoints with the names of objects that tf_keras gave them, and other files of version 0.1."""

import pathlib
import tarfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError, build_model, models, read_config, train
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.training.build.model import build_for_evaluation
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.of_tf_keras import (
    is_of_tf_keras,
    keys_of_tf_keras,
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


def node(**children):
    made = tf.train.Checkpoint()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def with_names(*names):
    """A layer of tf_keras whose weights have these names; the values are their lengths."""
    return node(
        **{name.rpartition("/")[2]: tf.Variable([float(len(name))], name=name) for name in names}
    )


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint of a model with these layers; returns its path."""

    def written(*layers):
        children = {f"layer_with_weights-{number}": layer for number, layer in enumerate(layers)}
        return node(model=node(**children)).write(str(tmp_path / "ckpt-1"))

    return written


def found(path, model):
    """What keys_of_tf_keras finds: the names in the checkpoint."""
    values = weights_of_tf_keras(path, keys_of_tf_keras(path, model))
    return {name_of(weight): int(value) for weight, (value,) in zip(model.weights, values)}


def sequence(*layers):
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


def test_weights_by_name_whatever_the_order(write):
    path = write(with_names("late/kernel", "late/bias"), with_names("early/kernel", "early/bias"))
    early, late = (keras.layers.Dense(2, name=name) for name in ("early", "late"))
    inputs = keras.Input([2])
    model = keras.Model(inputs, late(early(inputs)))
    assert is_of_tf_keras(path)
    lengths = {"early/kernel": 12, "early/bias": 10, "late/kernel": 11, "late/bias": 9}
    assert found(path, model) == lengths


def test_weights_of_other_names_by_place(write):
    """Numbers, names of models that layers are in, and of depthwise kernels differ."""
    path = write(
        with_names("conv2d_19/kernel"),
        node(**{"layer_with_weights-0": with_names("conv2d_20/kernel")}),
        with_names("depthwise_conv2d_7/depthwise_kernel", "depthwise_conv2d_7/bias"),
    )
    first, second = (keras.layers.Conv2D(3, 1, use_bias=False) for _ in range(2))
    inside = sequence(second)
    model = sequence(first, inside, keras.layers.DepthwiseConv2D(1))
    assert list(found(path, model).values()) == [16, 16, 35, 23]
    keys = keys_of_tf_keras(path, model)
    assert "layer_with_weights-1/layer_with_weights-0/" in keys[1]


def test_equal_names_in_several_models_by_place(write):
    blocks = [node(**{"layer_with_weights-0": with_names("conv/kernel")}) for _ in range(2)]
    path = write(*blocks)
    make = keras.layers.Conv2D
    model = sequence(*(sequence(make(3, 1, use_bias=False, name="conv")) for _ in range(2)))
    keys = keys_of_tf_keras(path, model)
    assert [key.split("/")[1] for key in keys] == ["layer_with_weights-0", "layer_with_weights-1"]


def test_layers_in_another_order_are_refused(write):
    path = write(with_names("conv2d_1/kernel"), with_names("conv2d/kernel"))
    model = sequence(
        *(keras.layers.Conv2D(3, 1, use_bias=False, name=f"conv2d_{i}") for i in (4, 5))
    )
    with pytest.raises(ValueError, match=r"conv2d_1/kernel in the place of .*conv2d_4/kernel"):
        keys_of_tf_keras(path, model)


def test_other_layers_are_refused(write):
    conv = keras.layers.Conv2D(3, 1, use_bias=False)
    with pytest.raises(ValueError, match="it has other layers in sequential"):
        keys_of_tf_keras(write(with_names("a/kernel"), with_names("b/kernel")), sequence(conv))
    with pytest.raises(ValueError, match=r"it has no .*kernel"):
        keys_of_tf_keras(write(with_names("conv2d/bias")), sequence(conv))


def test_averages_in_the_order_of_tf_keras(tmp_path):
    """Layer 2 comes before layer 10, which a model of today may list first."""
    averages = [tf.Variable([value]) for value in (20.0, 30.0, 10.0)]
    path = node(weight_averages=averages).write(str(tmp_path / "ckpt-1"))
    keys = [f"model/layer_with_weights-{part}" for part in ("10/kernel", "2/kernel", "2/bias")]
    assert shadows_of_tf_keras(path, "weight_averages", keys) == [[10], [20], [30]]
    with pytest.raises(ValueError, match="it has no slow_weights of model/layer_with_weights-2"):
        shadows_of_tf_keras(path, "slow_weights", keys)


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
    config = read_config(str(saved / "run")).replace(log_every="2 steps")
    before = (saved / "run" / "config.json").read_text()
    with pytest.raises(UserError, match=r"the version that began it \(imagenet_fast 0\.1\)"):
        train(config)
    assert (saved / "run" / "config.json").read_text() == before
