import collections
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import make_images_on_device
from imagenet_fast.lab.benchmarks import resnet9
from imagenet_fast.lab.benchmarks.timing import Spread
from imagenet_fast.training.build.model import build_classifier, build_model

RECIPE = pathlib.Path(__file__).parents[3] / "imagenet_fast" / "flags" / "myrtle_cifar10.flags"
CONFIG = Config.from_flagfile(
    RECIPE,
    width=2,
    image_size=8,
    crop_padding=2,
    batch_size=16,
    batch_norm_batch_size=8,
    precision="float32",
    xla=False,
)
LABELS = ("a", "b", "c")


def noise(count):
    return np.random.default_rng(1).integers(0, 256, (count, 8, 8, 3), np.uint8)


# --- Plain Keras


@pytest.mark.long
def test_the_peer_is_the_same_network():
    ours, theirs = build_classifier(CONFIG, LABELS), resnet9.keras_model(CONFIG, LABELS)
    assert type(theirs).train_step is keras.Model.train_step
    assert [v.shape for v in theirs.trainable_variables] == [
        v.shape for v in ours.trainable_variables
    ]
    theirs.set_weights(ours.get_weights())
    images = tf.constant(noise(4))
    expected = ours(images, training=False)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_array_equal(theirs(images, training=False), expected)


def test_the_peer_is_compiled_for_the_same_loss():
    model = resnet9.keras_model(CONFIG, LABELS)
    # Of logits, smoothed by 0.2.
    loss = model.loss(tf.constant([[1.0, 0, 0]]), tf.constant([[2.0, 1, 0]]))
    assert float(loss) == pytest.approx(0.6076060, abs=1e-6)
    assert (model.optimizer.momentum, model.optimizer.nesterov) == (0.9, True)


@pytest.mark.parametrize(
    "precision", [pytest.param("mixed_bfloat16", marks=pytest.mark.long), "mixed_float16"]
)
def test_the_peer_has_the_precision(precision):
    model = resnet9.keras_model(CONFIG.replace(precision=precision), LABELS)
    network = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    assert network.get_layer("prep_conv").dtype_policy.name == precision
    assert model.output.dtype == tf.float32
    scaled = isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert scaled == (precision == "mixed_float16")
    assert keras.mixed_precision.global_policy().name == "float32"


@pytest.mark.parametrize(("border", "mode"), [("reflect", "reflect"), ("zeros", "constant")])
def test_the_peer_gets_windows_of_its_images(border, mode):
    images, labels = noise(6), np.array([2, 0, 1, 1, 0, 2])
    config = CONFIG.replace(crop_border=border)
    where = {}
    for number, image in enumerate(images):
        padded = np.pad(image, [(2, 2), (2, 2), (0, 0)], mode)
        for top, left, mirror in np.ndindex(5, 5, 2):
            window = padded[top : top + 8, left : left + 8]
            window = window[:, ::-1] if mirror else window
            where[window.tobytes()] = (number, (top, left), mirror)
    found = []
    for batch, answers in resnet9.keras_dataset(images, labels, 3, config).take(9):
        assert (batch.shape, batch.dtype) == ([16, 8, 8, 3], tf.uint8)
        for image, answer in zip(batch.numpy(), answers.numpy()):
            found.append(where[image.tobytes()])
            np.testing.assert_array_equal(answer, np.eye(3)[labels[found[-1][0]]])
    numbers, corners, mirrored = zip(*found)
    assert sorted(collections.Counter(numbers).values()) == [24] * 6
    assert len(set(corners)) > 20
    assert 40 < sum(mirrored) < 104


# --- Parts


@pytest.mark.parametrize("xla", [False, True])
def test_the_network_alone(xla):
    """Against the gradient of softmax and a matrix product, summed over the images."""
    random = np.random.default_rng(2)
    images, labels = random.normal(size=(5, 4)).astype("float32"), np.array([0, 2, 1, 1, 0])
    pixels = keras.Input([4])
    network = keras.Model(pixels, keras.layers.Dense(3, use_bias=False)(pixels))
    weights = network.get_weights()
    alone = resnet9.network_gradients(network, tf.constant(images), tf.constant(labels), xla)
    exponents = np.exp(images @ weights[0])
    slopes = exponents / exponents.sum(axis=1, keepdims=True) - np.eye(3)[labels]
    for _ in range(2):
        (gradient,) = alone()
        np.testing.assert_allclose(gradient, images.T @ slopes, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(network.get_weights()[0], weights[0])


@pytest.mark.long
def test_random_images_are_data_of_the_recipe(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        resnet9.write_random_images(path, 24, CONFIG)
    configs = [CONFIG.replace(data_dir=path, strategy="one_device") for path in paths]
    plain = {"train_crop": "none", "flip": False, "augment_in_groups": False, "batch_size": 24}
    seen = []
    for config in configs:
        images, labels, weights = make_images_on_device(config.replace(**plain), "train").batch(
            tf.constant(0, tf.int64), 0
        )
        assert images.shape == (24, 8, 8, 3)
        assert set(weights.numpy()) == {1} and set(labels.numpy()) <= set(range(10))
        # Uniform in 0..255.
        assert abs(np.mean(images) - 127.5) < 4 and abs(np.std(images) - 73.9) < 3
        seen.append(images)
    np.testing.assert_array_equal(*seen)


# --- All together


@pytest.mark.long
def test_all_variants_are_timed(monkeypatch):
    models = {}

    def build(config):
        models["ours"] = build_model(config)
        return models["ours"]

    def compile_theirs(config, labels):
        models["theirs"] = keras_model(config, labels)
        return models["theirs"]

    keras_model = resnet9.keras_model
    monkeypatch.setattr(resnet9, "build_model", build)
    monkeypatch.setattr(resnet9, "keras_model", compile_theirs)
    comparison = resnet9.compare_resnet9(CONFIG, warmup=1, repeats=2, steps=3)
    # Ours: of each turn the steps and as many updates alone. Theirs: also one before the clock.
    assert {name: int(model.optimizer.iterations) for name, model in models.items()} == {
        "ours": 18,
        "theirs": 12,
    }
    assert models["ours"].steps_per_epoch == 10
    assert comparison.names == resnet9.NAMES
    assert [len(times.seconds) for times in comparison.times] == [2] * 5
    assert all(min(times.seconds) > 0 for times in comparison.times)
    assert comparison.images == 48
    whole, _, network, *_ = (np.array(times.seconds) for times in comparison.times)
    assert comparison.fractions == {"outside the network": Spread.of(1 - network / whole)}
    assert comparison.title == "resnet9, width 2, 3 training steps: batch 16, 8 px, float32"
    assert comparison.notes[0].startswith("160 images.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet8"}, "recipe with model=resnet9, .* has model=resnet8"),
        ({"train_crop": "none"}, "train_crop=pad, .* train_crop=none"),
        (
            {"data_on_device": False, "augment_in_groups": False},
            "data_on_device=True, .* data_on_device=False",
        ),
    ],
)
def test_another_recipe(changes, message):
    with pytest.raises(UserError, match=message):
        resnet9.compare_resnet9(CONFIG.replace(**changes), warmup=1, repeats=1)
