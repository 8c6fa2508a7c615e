"""Networks of Keras Applications by name."""

import inspect

import keras
import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.models import applications
from imagenet_fast.models.applications import (
    application_names,
    application_normalization,
    application_weights,
    build_application,
    corrected_variance,
    pretrained_application,
)
from imagenet_fast.models.options import own_image_size

pytestmark = pytest.mark.skipif(KERAS_2, reason="needs Keras 3")
# One network for each of Keras' modules.
FAMILIES = {inspect.getmodule(getattr(keras.applications, n)): n for n in application_names()}


def test_all_of_keras_applications_have_names():
    names = application_names()
    assert {"ConvNeXtTiny", "EfficientNetV2B0", "MobileNetV3Small", "ResNet50", "VGG16"} <= {*names}
    assert len(names) >= 38
    assert all(name[0].isupper() for name in names)


@pytest.mark.parametrize("name", application_names())
def test_pixels_become_those_of_keras_preprocess_input(name):
    pixels = np.random.RandomState(0).randint(0, 256, [2, 5, 7, 3]).astype(np.uint8)
    module = inspect.getmodule(getattr(keras.applications, name))
    expected = module.preprocess_input(pixels.astype(np.float32))
    own = application_normalization(name)
    found = np.asarray(PixelNormalization(own.mean, own.std)(pixels))
    found = found[..., ::-1] if own.reverse else found
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-5)


def test_a_network_takes_colors_in_the_order_of_its_weights():
    """ResNet's weights were trained on blue, green and red."""
    network = build_application("ResNet50", 3, (32, 32, 3))
    theirs = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=(32, 32, 3), pooling="avg"
    )
    theirs.set_weights(network.get_weights()[:-2])
    pixels = np.random.RandomState(0).randint(0, 256, [2, 32, 32, 3]).astype(np.float32)
    own = application_normalization("ResNet50")
    normalized = np.asarray(PixelNormalization(own.mean, own.std)(pixels))
    features = theirs(keras.applications.resnet.preprocess_input(pixels.copy()))
    expected = network.get_layer("logits")(features)
    np.testing.assert_allclose(network(normalized), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["MobileNetV3Small", pytest.param("ConvNeXtTiny", marks=pytest.mark.long)]
)
def test_a_network_is_that_of_keras_with_a_new_head(name):
    network = build_application(name, 5, (None, None, 3))
    theirs = getattr(keras.applications, name)(include_top=False, weights=None, pooling="avg")
    shapes = [tuple(weight.shape) for weight in network.weights]
    features = theirs.output.shape[-1]
    assert shapes == [*(tuple(w.shape) for w in theirs.weights), (features, 5), (5,)]
    assert network.output.shape == (None, 5)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match=r"no model keras:ResNet51; did you mean .*'ResNet50'"):
        build_application("ResNet51", 10, (32, 32, 3))


@pytest.mark.parametrize("top", [False, True])
def test_weights_file_with_and_without_top(tmp_path, top):
    file = tmp_path / "theirs.weights.h5"
    theirs = keras.applications.MobileNetV2(include_top=top, weights=None)
    theirs.save_weights(file)
    weights = application_weights("MobileNetV2", file)
    expected = theirs.get_weights()[: -2 if top else None]
    assert len(weights) == len(expected)
    for own, other in zip(weights, expected):
        np.testing.assert_array_equal(own, other)


def test_weights_file_of_another_network(tmp_path):
    file = tmp_path / "theirs.weights.h5"
    keras.Sequential([keras.Input([4]), keras.layers.Dense(2)]).save_weights(file)
    with pytest.raises(UserError, match=r"theirs\.weights\.h5 does not hold .*keras:MobileNetV2"):
        application_weights("MobileNetV2", file)
    keras.applications.MobileNet(include_top=False, weights=None).save_weights(file)
    message = r"expanded_conv_project.*\(1, 1, 32, 16\).*\(1, 1, 32, 64\)\.$"
    with pytest.raises(UserError, match=message):
        application_weights("MobileNetV2", file)
    file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    with pytest.raises(UserError, match="does not hold the weights of keras:MobileNetV2"):
        application_weights("MobileNetV2", file)


def test_efficientnet_computes_what_its_published_weights_were_trained_to():
    """Keras adds a layer for it, but only if it makes the network with these weights."""
    published, x = np.array([0.229, 0.224, 0.225], np.float32), np.array([3.0, -1.0, 2.0])
    theirs = x / np.sqrt(published) / np.sqrt(published)
    np.testing.assert_allclose(x / np.sqrt(corrected_variance(published)), theirs, rtol=1e-6)
    for other in (published**2, np.ones(3), np.array([0.229] * 4)):
        np.testing.assert_array_equal(corrected_variance(other), other)


def test_without_a_network_an_error_says_what_to_put_where(tmp_path, monkeypatch):
    def refuse(url, *_):
        raise keras.src.utils.file_utils.urllib.error.URLError("unreachable")

    monkeypatch.setattr(keras.src.utils.file_utils.config, "keras_home", lambda: str(tmp_path))
    monkeypatch.setattr(keras.src.utils.file_utils, "urlretrieve", refuse)
    with pytest.raises(UserError) as error:
        pretrained_application("NASNetMobile")
    assert "https://storage.googleapis.com/" in str(error.value)
    assert f"put the file at {tmp_path}/models/nasnet_mobile_no_top.h5" in str(error.value)


def test_pretrained_weights_are_those_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(keras.src.utils.file_utils.config, "keras_home", lambda: str(tmp_path))
    theirs = keras.applications.MobileNetV2(include_top=False, weights=None)
    (tmp_path / "models").mkdir()
    theirs.save(tmp_path / "weights.h5")
    name = "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_1.0_224_no_top.h5"
    (tmp_path / "weights.h5").rename(tmp_path / "models" / name)
    for own, other in zip(pretrained_application("MobileNetV2"), theirs.get_weights()):
        np.testing.assert_array_equal(own, other)


def test_downloads_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    calls = []
    monkeypatch.setattr(applications.fcntl, "flock", lambda *arguments: calls.append(arguments))
    with applications.one_process_downloads():
        assert calls[0][1] == applications.fcntl.LOCK_EX


def test_networks_have_the_sizes_of_keras(monkeypatch):
    class FoundError(Exception):
        pass

    def obtain_input_shape(_, default_size, **__):
        raise FoundError(default_size)

    utilities = keras.src.applications.imagenet_utils
    monkeypatch.setattr(utilities, "obtain_input_shape", obtain_input_shape)
    for name in application_names():
        if name.startswith("MobileNetV3"):  # it has no default
            continue
        with pytest.raises(FoundError) as found:
            getattr(keras.applications, name)(weights=None)
        assert own_image_size(f"keras:{name}") == found.value.args[0], name
    assert own_image_size("keras_hub:resnet") is None
    assert own_image_size("resnet50") is None
