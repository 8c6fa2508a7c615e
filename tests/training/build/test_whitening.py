"""Whitening filters from the first training images."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import build_model, make_dataset
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.models import network_of

OPTIONS = {"model": "resnet9", "width": 4, "whitening": True, "eval_crop_fraction": 1.0}


@pytest.fixture(scope="module")
def on_digits(digits):
    return SMALL.replace(synthetic=False, num_classes=0, data_dir=digits, **OPTIONS)


def whitening_of(model):
    return network_of(model).get_layer("whitening")


def test_filters_whiten_patches_of_the_first_training_images(on_digits):
    config = on_digits.replace(whitening_images=10_000, color_jitter=0.0)
    model = build_model(config)
    batches = iter(make_dataset(config.replace(flip=False), "train"))
    images = np.concatenate([next(batches)[0].numpy() for _ in range(40)])
    outputs = whitening_of(model)(model.get_layer("normalize")(images))
    # Where no patch reaches over the border.
    values = outputs.numpy()[:, 1:-1, 1:-1].reshape(-1, 27).astype("float64")
    covariance = values.T @ values / len(values)
    variances = np.diag(covariance)
    np.testing.assert_allclose(covariance - np.diag(variances), 0, atol=0.05)
    # lambda / (lambda + epsilon): grey patches have nine dimensions, and one more by which
    # the colours were normalized differently.
    assert (variances[:9] > 0.6).all() and (variances[10:] < 0.01).all()


@pytest.fixture(scope="module")
def built(on_digits):
    """A model with filters from 40 images."""
    return build_model(on_digits.replace(whitening_images=40))


@pytest.mark.long
def test_number_of_images(on_digits, built):
    other, again = (
        whitening_of(build_model(on_digits.replace(whitening_images=count))).kernel.numpy()
        for count in (80, 40)
    )
    np.testing.assert_array_equal(whitening_of(built).kernel, again)
    assert not np.allclose(whitening_of(built).kernel, other)


@pytest.mark.long
def test_filters_are_not_trained_and_biases_are(on_digits):
    model = build_model(on_digits.replace(model="airbench94", whitening=False, image_size=16))
    layer = whitening_of(model)
    before = layer.kernel.numpy()
    model.fit(make_dataset(model.config, "train"), steps_per_epoch=2, epochs=1, verbose=0)
    np.testing.assert_array_equal(layer.kernel, before)
    assert np.abs(layer.bias).max() > 0


@pytest.mark.parametrize(
    "options",
    [{"ema_decay": 0.9}, pytest.param({"lookahead_every": 5}, marks=pytest.mark.long)],
    ids=str,
)
def test_shadow_weights_start_with_the_filters(options):
    model = build_model(SMALL.replace(**OPTIONS, **options))
    copies = model.weight_average or model.lookahead
    for copy, weight in zip(copies.averages, model.weights):
        np.testing.assert_array_equal(copy, weight, err_msg=weight.name)


def test_synthetic_images_have_filters_too():
    model = build_model(SMALL.replace(**OPTIONS))
    assert np.isfinite(whitening_of(model).kernel).all()


def test_other_networks_are_unchanged():
    model = build_model(SMALL)
    assert not [layer for layer in layers_in(model) if isinstance(layer, PatchWhitening)]


@pytest.mark.long
def test_a_checkpoint_restores_its_filters(on_digits, built, tmp_path):
    path = tf.train.Checkpoint(model=built).save(str(tmp_path / "c"))
    other = build_model(on_digits.replace(synthetic=True, num_classes=10, data_dir=""))
    assert not np.allclose(whitening_of(built).kernel, whitening_of(other).kernel)
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(whitening_of(built).kernel, whitening_of(other).kernel)
    keras.backend.clear_session()
