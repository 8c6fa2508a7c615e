"""AlexNet-BN against the counts and the order of layers of Jia et al. 2018."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models.alexnet import alexnet_bn
from imagenet_fast.models.shape_only import shape_only


@functools.cache
def published(pixels):
    """One for the tests that look at no values."""
    with shape_only():
        return alexnet_bn(1000, (pixels, pixels, 3))


def size(variables):
    return sum(math.prod(v.shape) for v in variables)


def order(model, names):
    """Those of the names that the model has, as it runs them (it has no branches)."""
    return [layer.name for layer in model.layers if layer.name in names]


@pytest.mark.parametrize("pixels", [224, 227])
def test_counts(pixels):
    variables = published(pixels).trainable_variables
    assert (size(variables), len(variables)) == (62_381_096, 26)
    roles = [name_of(variable).split("/")[-1] for variable in variables]
    assert roles[:20] == ["kernel", "bias", "gamma", "beta"] * 5
    # Jia et al. send the gradients in two parts, split between the tensors 20 and 21.
    assert size(variables[:20]) == 3_747_200 + 2_752
    assert size(v for v in variables[:20] if "bn" in name_of(v)) == 2_752
    assert size(variables[20:]) == 58_631_144


@pytest.mark.parametrize("pixels", [224, 227])
def test_sizes_are_those_of_the_publication(pixels):
    model = published(pixels)
    sizes = [model.get_layer(f"conv{i}").output.shape[1:] for i in range(1, 6)]
    assert sizes == [(55, 55, 96), (27, 27, 256), (13, 13, 384), (13, 13, 384), (13, 13, 256)]
    assert model.get_layer("pool5").output.shape[1:] == (6, 6, 256)
    assert any(layer.name == "conv1_pad" for layer in model.layers) == (pixels == 224)


def test_fifth_batch_norm_follows_the_pool():
    names = ["conv1", "bn1", "relu1", "pool1", "conv2", "bn2", "relu2", "pool2"]
    names += ["conv3", "bn3", "relu3", "conv4", "bn4", "relu4"]
    names += ["conv5", "relu5", "pool5", "bn5", "flatten"]
    names += ["fc6", "relu6", "dropout6", "fc7", "relu7", "dropout7", "logits"]
    assert [layer.name for layer in published(227).layers] == ["images", *names]


@pytest.mark.long
def test_without_the_fifth_batch_norm():
    model = alexnet_bn(10, (64, 64, 3), batch_norm_after_pool5=False)
    assert len(model.trainable_variables) == 24
    assert order(model, ("bn4", "bn5", "pool5", "flatten")) == ["bn4", "pool5", "flatten"]


def test_padding_is_by_side():
    model = alexnet_bn(10, (67, 64, 3))
    assert model.get_layer("conv1_pad").padding == ((0, 0), (2, 2))
    assert model.get_layer("pool5").output.shape == (None, 1, 1, 256)
    assert model.get_layer("fc6").kernel.shape == (256, 4096)


def test_dropout_is_in_both_hidden_layers_and_in_training_only():
    model = alexnet_bn(10, (64, 64, 3), dropout=0.25)
    assert {model.get_layer(f"dropout{i}").rate for i in (6, 7)} == {0.25}
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype("float32")
    np.testing.assert_array_equal(model(images, training=False), model(images, training=False))
    assert not np.array_equal(model(images, training=True), model(images, training=True))


def test_init():
    keras.utils.set_random_seed(0)
    model = alexnet_bn(1000, (64, 64, 3))
    for name, std in (
        ("conv1", math.sqrt(2 / (11 * 11 * 3))),
        ("conv2", math.sqrt(2 / (5 * 5 * 96))),
        ("conv4", math.sqrt(2 / (3 * 3 * 384))),
        ("fc6", 0.005),
        ("fc7", 0.005),
        ("logits", 0.01),
    ):
        layer = model.get_layer(name)
        assert abs(layer.kernel.numpy().std() / std - 1) < 0.02, name
        assert not layer.bias.numpy().any()


@pytest.mark.parametrize("shape", [(63, 64, 3), (64, 28, 3), (None, None, 3)])
def test_image_is_too_small_or_unknown(shape):
    with pytest.raises(UserError, match="at least 64 x 64"):
        alexnet_bn(10, shape)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_out_of_range(dropout):
    with pytest.raises(UserError, match="dropout"):
        alexnet_bn(10, (64, 64, 3), dropout=dropout)
