"""Weights of Keras applications give the same logits here as there."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models.keras_applications import load_keras_applications_weights
from imagenet_fast.models.resnet import cifar_resnet, resnet

# Two networks are made, which takes seconds, and what loads weights seldom changes.
pytestmark = pytest.mark.long

SHAPE = (96, 64, 3)
CLASSES = 7


def theirs(depth=50, classes=CLASSES, **options):
    make = getattr(keras.applications, f"ResNet{depth}")
    return make(
        weights=None,
        input_shape=SHAPE,
        classes=classes,
        **{"classifier_activation": None, **options},
    )


def ours(depth=50, classes=CLASSES, **options):
    options = {"stride_on_1x1": True, "batch_norm_epsilon": 1.001e-5, **options}
    return resnet(depth, classes, SHAPE, **options)


def randomise(model, seed=0):
    """Biases, gains and statistics that a mistake in their order or sign would show."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        values = layer.get_weights()
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = values[0].shape
            values = [
                rng.uniform(0.5, 1.5, shape),
                rng.normal(0, 0.3, shape),
                rng.normal(0, 0.3, shape),
                rng.uniform(0.5, 1.5, shape),
            ]
        elif len(values) == 2:
            values[1] = rng.normal(0, 0.5, values[1].shape)
        layer.set_weights(values)


def save_weights(model, path):
    """Writes weights as in the files for download, which Keras 3 reads, but no longer writes."""
    model.save(path)
    with h5py.File(path, "r+") as file:
        for name in list(file["model_weights"]):
            file.move(f"model_weights/{name}", name)
        del file["model_weights"]


@pytest.fixture(scope="module")
def source():
    keras.utils.set_random_seed(1)
    model = theirs()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def headless(source):
    model = theirs(include_top=False)
    model.set_weights(source.get_weights()[:-2])
    return model


@pytest.fixture(scope="module")
def deeper():
    model = theirs(101)
    randomise(model)
    return model


@pytest.fixture(scope="module")
def initial():
    """A model, and its weights."""
    model = ours()
    return model, model.get_weights()


@pytest.fixture
def model(initial):
    """With its initial weights: making one takes longer."""
    model, weights = initial
    model.set_weights(weights)
    return model


@pytest.fixture(scope="module")
def of_three_classes():
    return ours(classes=3)


@pytest.fixture(scope="module")
def our_deeper():
    return ours(101)


@pytest.fixture(scope="module")
def weights_file(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "resnet50.h5"
    save_weights(source, path)
    return path


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(2).normal(size=(4, *SHAPE)).astype("float32")


def assert_same(logits, expected):
    expected = np.asarray(expected)
    assert expected.std() > 0
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_logits_are_the_same(model, source, images):
    load_keras_applications_weights(model, source)
    assert_same(model(images, training=False), source(images, training=False))


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_logits_are_the_same_from_a_file(model, source, weights_file, images, tmp_path):
    source.save(tmp_path / "whole.h5")
    before = model.get_weights()
    for path in (weights_file, str(tmp_path / "whole.h5")):
        model.set_weights(before)
        load_keras_applications_weights(model, path)
        assert_same(model(images, training=False), source(images, training=False))


def test_the_classifier_has_another_name_in_the_files_for_download(
    model, weights_file, images, source
):
    with h5py.File(weights_file, "r+") as file:
        file.move("predictions", "probs")
    try:
        load_keras_applications_weights(model, weights_file)
    finally:
        with h5py.File(weights_file, "r+") as file:
            file.move("probs", "predictions")
    assert_same(model(images, training=False), source(images, training=False))


def test_depth_101_has_the_same_layers(our_deeper, deeper):
    model = our_deeper
    load_keras_applications_weights(model, deeper)
    np.testing.assert_array_equal(
        model.get_layer("stage3_block23_conv2").kernel,
        deeper.get_layer("conv4_block23_2_conv").kernel,
    )
    np.testing.assert_allclose(
        model.get_layer("stage4_block1_projection_bn").moving_mean,
        deeper.get_layer("conv5_block1_0_bn").moving_mean
        - deeper.get_layer("conv5_block1_0_conv").bias,
        rtol=1e-6,
    )


def test_without_the_classifier(of_three_classes, weights_file, images, headless, tmp_path):
    save_weights(headless, tmp_path / "notop.h5")
    model, initial = of_three_classes, of_three_classes.get_weights()
    head = model.get_layer("logits").get_weights()
    features = keras.Model(model.inputs, model.get_layer("stage4_block3_relu").output)
    for path in (tmp_path / "notop.h5", weights_file):
        model.set_weights(initial)
        load_keras_applications_weights(model, path, include_top=False)
        for before, after in zip(head, model.get_layer("logits").get_weights()):
            np.testing.assert_array_equal(before, after)
        assert_same(features(images, training=False), headless(images, training=False))


def test_weights_without_a_classifier(model, headless):
    with pytest.raises(UserError, match="no classifier; use include_top=False"):
        load_keras_applications_weights(model, headless)


def test_other_number_of_classes_leaves_the_model_unchanged(source, of_three_classes):
    model = of_three_classes
    before = model.get_weights()
    with pytest.raises(
        UserError, match=r"logits/kernel is \(2048, 3\), not \(2048, 7\).*include_top=False"
    ):
        load_keras_applications_weights(model, source)
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_other_depth(source, deeper, our_deeper, model):
    with pytest.raises(UserError, match=r"the weights lack conv4_block\d+_\d_conv.* more; build"):
        load_keras_applications_weights(our_deeper, source)
    with pytest.raises(UserError, match=r"the model lacks conv4_block\d+_\d_bn.* more; build"):
        load_keras_applications_weights(model, deeper)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours(stride_on_1x1=False), "stride_on_1x1=True"),
        (lambda: ours(blur_pool="convolutions"), 'blur_pool="none"'),
        (lambda: ours(padding="same_pool"), 'padding="symmetric"'),
        (lambda: ours(batch_norm_epsilon=1e-5), "batch_norm_epsilon=1e-05 .*1.001e-05$"),
        (lambda: ours(stem="small"), r"stem_conv/kernel is \(3, 3, 3, 64\), not \(7, 7, 3, 64\)"),
        (lambda: resnet(18, CLASSES, SHAPE), r"no weights for resnet18.*resnet\(152\)"),
        (lambda: cifar_resnet(20), "no weights for resnet20"),
    ],
)
def test_other_variants(make, message, source):
    with pytest.raises(UserError, match=message):
        load_keras_applications_weights(make(), source)


@pytest.mark.parametrize("name", ["stage1_block1_se_reduce", "dropout"])
def test_layers_that_keras_lacks(name, model, source, monkeypatch):
    layer = model.get_layer("stage1_block1_conv1")
    monkeypatch.setattr(layer, "_name" if KERAS_2 else "name", name)
    with pytest.raises(UserError, match=f"no weights for the layer {name}"):
        load_keras_applications_weights(model, source)


def test_another_network(model):
    source = keras.applications.MobileNetV2((96, 96, 3), weights=None, classes=CLASSES)
    with pytest.raises(UserError, match="weights are not of resnet50: the weights lack conv1_"):
        load_keras_applications_weights(model, source)


def test_no_file_and_no_hdf5(tmp_path, model):
    with pytest.raises(UserError, match=r"no weight file .*none\.h5"):
        load_keras_applications_weights(model, tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("not weights")
    with pytest.raises(UserError, match=r"text\.h5 cannot be read"):
        load_keras_applications_weights(model, tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_group("a")["b"] = np.zeros(3)
    with pytest.raises(UserError, match=r"other\.h5 cannot be read"):
        load_keras_applications_weights(model, tmp_path / "other.h5")


def test_file_of_a_kilobyte_that_claims_terabytes(tmp_path, model):
    with h5py.File(tmp_path / "claim.h5", "w") as file:
        group = file.create_group("conv1_conv/conv1_conv")
        space = h5py.h5s.create_simple((2**40,))
        h5py.h5d.create(group.id, b"kernel:0", h5py.h5t.IEEE_F32LE, space)
    with pytest.raises(UserError, match=r"claim\.h5 cannot be read .*has shape \(1099511627776,\)"):
        load_keras_applications_weights(model, tmp_path / "claim.h5")


def test_link_to_another_file(tmp_path, model):
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["conv1_conv"] = h5py.ExternalLink("/etc/passwd", "x")
    with pytest.raises(UserError, match=r"link\.h5 cannot be read"):
        load_keras_applications_weights(model, tmp_path / "link.h5")


def test_more_than_any_network_has(tmp_path, model):
    with (tmp_path / "holes.h5").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"holes\.h5 cannot be read .* but may have 1,073,741,824"):
        load_keras_applications_weights(model, tmp_path / "holes.h5")
