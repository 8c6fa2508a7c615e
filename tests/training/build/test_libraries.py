"""Networks of other libraries by name, in runs."""

import keras
import numpy as np
import pytest
from small_config import SMALL

from imagenet_fast import Config, UserError, build_model, read_config
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models import network_of
from imagenet_fast.training.build import fine_tune
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.optimizer import layer_rate_factors
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir

pytestmark = pytest.mark.skipif(KERAS_2, reason="needs Keras 3")
NAMED = SMALL.replace(model="keras:MobileNetV3Small", image_size=32)
CLASSES = tuple(map(str, range(10)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Keras' network with its top and random weights, and its files."""
    folder = tmp_path_factory.mktemp("theirs")
    keras.utils.set_random_seed(3)
    network = keras.applications.MobileNetV3Small(weights=None)
    network.save(folder / "theirs.keras")
    network.save_weights(folder / "theirs.weights.h5")
    return network, folder


def assert_same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "file", ["theirs.weights.h5", pytest.param("theirs.keras", marks=pytest.mark.long)]
)
def test_a_run_starts_from_a_file_with_a_new_head(theirs, file, capfd):
    network, folder = theirs
    path = str(folder / file)
    options = {"freeze_through": "all_but_head", "duration": "20 steps"}
    model = build_model(NAMED.replace(initial_weights=path, **options))
    own = network_of(model).get_weights()
    assert_same(own[:-2], network.get_weights())
    assert [tuple(value.shape) for value in own[-2:]] == [(576, 10), (10,)]
    assert len(model.trainable_variables) == 2
    said = capfd.readouterr().err
    assert f"initial weights: those of {path}, except the classification head" in said
    assert "moving averages" not in said  # They are frozen.
    # MobileNetV3 scales pixels itself.
    normalize = model.get_layer("normalize")
    assert (normalize.mean, normalize.std) == ((0, 0, 0), (1, 1, 1))


def test_files_of_other_networks_and_kinds_are_refused(theirs, tmp_path):
    with pytest.raises(UserError, match=r"does not exist: give the model_dir of a run with this"):
        build_model(NAMED.replace(initial_weights=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="is not the model_dir of a run with this network"):
        build_model(NAMED.replace(initial_weights=str(tmp_path)))
    x = keras.Input([3])
    keras.Model(x, keras.layers.Dense(2)(x)).save(tmp_path / "other.keras")
    with pytest.raises(
        UserError, match=r"other\.keras holds another network than MobileNetV3Small"
    ):
        build_model(NAMED.replace(initial_weights=str(tmp_path / "other.keras")))


def test_a_run_is_initial_weights_with_its_head(tmp_path):
    config = NAMED.replace(model_dir=str(tmp_path))
    model = build_classifier(config, CLASSES)
    model.compile(optimizer="sgd")
    random = np.random.RandomState(0)
    for variable in model.weights:
        variable.assign(random.uniform(0.5, 1.0, variable.shape))
    claim_model_dir(config, CLASSES)
    Checkpoints(model, config).save(1, {})
    loaded = build_model(NAMED.replace(initial_weights=str(tmp_path)))
    assert_same(network_of(loaded).get_weights(), network_of(model).get_weights())


def test_pretrained_weights_are_the_librarys(theirs, monkeypatch, capfd):
    network, _ = theirs
    asked = []
    monkeypatch.setattr(
        fine_tune, "pretrained_weights", lambda name: asked.append(name) or network.weights
    )
    options = {
        "pretrained": True,
        "layer_decay": 0.5,
        "freeze_through": "2",
        "duration": "20 steps",
    }
    model = build_model(NAMED.replace(**options))
    assert asked == [NAMED.model]
    # Keras' MobileNetV3 has a momentum for long runs.
    said = capfd.readouterr().err
    assert "moving averages will be 98% the initial ones at the end of the run" in said
    assert "their momentum is 0.999 for 20 steps" in said
    assert_same(network_of(model).get_weights()[:-2], network.get_weights())
    rate = f"the learning rate of expanded_conv_1 is {0.5**11:.3g} times that of logits, 11 blocks"
    assert rate in said
    # Two of fourteen blocks are frozen; the head is twelve blocks behind the first that is not.
    factors = model.optimizer.rate_factors
    assert factors == layer_rate_factors(NAMED.replace(**options), model)
    assert (factors[0], factors[-2:]) == (0.5**11, [1, 1])
    # Not from a run that anybody made.
    assert not read_config_of(NAMED.replace(pretrained=True)).pretrained


def read_config_of(config):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        claim_model_dir(config.replace(model_dir=folder), CLASSES)
        return read_config(folder)


def test_weight_decay_shrinks_with_the_learning_rate_of_a_layer():
    """In the gradient it does anyway; the factor of the decay itself stays 1."""
    model = build_model(SMALL.replace(layer_decay=0.5))
    factors = model.optimizer.rate_factors
    assert (min(factors), max(factors)) == (0.5**4, 1)  # three blocks between stem and head
    assert {*model.optimizer.weight_decay_mask} == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": True}, "pretrained=true is for model=keras:NAME or model=keras_hub:"),
        ({"normalization": "pixel_mean"}, "normalization=pixel_mean is for model=keras:NAME"),
        ({"model": "keras:VGG16", "pretrained": True, "initial_weights": "x"}, "leave out one"),
        ({"model": "my:net", "initial_weights": "x"}, "initial_weights=x is not for model=my:net"),
        ({"model": "keras:VGG16", "freeze_through": "1"}, "give --initial_weights or --pretrained"),
        ({"layer_decay": 0.0}, "layer_decay is 0, but must be in"),
        ({"optimizer_arguments": ("a=1",)}, "optimizer_arguments=a=1 has no effect"),
        ({"optimizer": "adam", "optimizer_arguments": ("a",)}, "must be NAME=VALUE, each"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)


def test_unknown_names_and_small_images_are_errors_before_any_work():
    with pytest.raises(UserError, match=r"no model keras:VGG61; did you mean .*VGG16"):
        build_model(SMALL.replace(model="keras:VGG61"))
    with pytest.raises(UserError, match="keras:Xception failed: ValueError: Input size must be"):
        build_model(SMALL.replace(model="keras:Xception"))


def test_other_normalization_is_the_runs_own():
    config = NAMED.replace(normalization="pixel_mean", pixel_mean=(1, 2, 3), pixel_std=(4, 5, 6))
    model = build_classifier(config, CLASSES)
    assert model.get_layer("normalize").mean == (1, 2, 3)


@pytest.mark.long
def test_published_efficientnet_computes_what_keras_makes_of_it(tmp_path, monkeypatch):
    """Keras adds a layer when it loads these weights, which the network here has not."""
    keras.utils.set_random_seed(5)
    options = {"include_top": False, "input_shape": (32, 32, 3), "pooling": "avg"}
    published = keras.applications.EfficientNetB0(weights=None, **options)
    normalization = next(own for own in published.layers if "normalization" in own.name)
    normalization.set_weights(
        [np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225]), np.array(0)]
    )
    file = tmp_path / "efficientnetb0_notop.h5"
    published.save(file)
    monkeypatch.setattr(keras.src.utils.file_utils, "get_file", lambda *_, **__: str(file))
    theirs = keras.applications.EfficientNetB0(weights="imagenet", **options)
    model = build_model(NAMED.replace(model="keras:EfficientNetB0", pretrained=True))
    network = network_of(model)
    pixels = np.random.RandomState(0).randint(0, 256, [2, 32, 32, 3]).astype(np.float32)
    # Behind the first convolution; the last features of random weights are near 0.
    found, expected, without = (
        keras.Model(own.inputs, own.get_layer("stem_conv").output)(pixels)
        for own in (network, theirs, published)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(without) - np.asarray(expected)).max() > 0.1  # the layer matters
