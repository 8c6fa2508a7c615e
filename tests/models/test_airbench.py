"""airbench's networks against their counts and a network in NumPy."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest
from numpy_network import (
    BatchNorm,
    Chain,
    Conv,
    Logits,
    MaxPool,
    Residual,
    assert_same_step,
    gelu,
    silu,
)

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models.airbench import AIRBENCH_SIZES, IdentityFilters, airbench
from imagenet_fast.training.build.fine_tune import freeze

# Trainable parameters; those of 96 are counted by hand.
COUNTS = {94: 1_971_352, 95: 4_604_440, 96: 9_915_416, "96_proxy": 146_112}


@functools.cache
def published(size):
    """One for the tests that only look."""
    keras.utils.set_random_seed(0)
    return airbench(size)


def count(variables):
    return sum(math.prod(v.shape) for v in variables)


def norms_of(model):
    return [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]


@pytest.mark.parametrize("size", AIRBENCH_SIZES)
def test_counts(size):
    model = published(size)
    assert model.name == f"airbench{size}"
    assert count(model.trainable_variables) == COUNTS[size]
    whitening = model.get_layer("whitening")
    bias = 0 if size == "96_proxy" else 24
    assert count(whitening.trainable_weights) == bias
    assert count(whitening.non_trainable_weights) == 288


@pytest.mark.parametrize(("size", "momentum"), [(94, 0.6), (95, 0.6), (96, 0.9), ("96_proxy", 0.9)])
def test_batch_norm_is_the_published_one(size, momentum):
    norms = norms_of(published(size))
    assert len(norms) == (9 if size == 96 else 6)
    assert {(norm.momentum, norm.epsilon, norm.gamma) for norm in norms} == {
        (momentum, 1e-12, None)
    }


def test_none_stands_for_the_published_batch_norm():
    model = airbench(94, width=2, batch_norm_momentum=None, batch_norm_epsilon=None)
    assert {(norm.momentum, norm.epsilon) for norm in norms_of(model)} == {(0.6, 1e-12)}


def test_batch_norm_options():
    model = airbench(94, width=2, batch_norm_momentum=0.0, batch_norm_epsilon=0.5)
    assert {(norm.momentum, norm.epsilon) for norm in norms_of(model)} == {(0.0, 0.5)}


def test_sizes_of_the_images():
    model = published(94)
    names = ("whitening", "group1_block1_pool", "group2_block2_gelu", "group3_block2_gelu")
    assert [model.get_layer(name).output.shape[1:] for name in names] == [
        (31, 31, 24),
        (15, 15, 64),
        (7, 7, 256),
        (3, 3, 256),
    ]


@pytest.mark.parametrize(
    ("size", "filters"),
    [(94, (2, 8, 8)), (95, (2, 6, 6)), (96, (2, 6, 8)), ("96_proxy", (2, 4, 4))],
)
def test_width_is_in_proportion(size, filters):
    model = airbench(size, width=2)
    assert tuple(model.get_layer(f"group{i}_block2_conv").filters for i in (1, 2, 3)) == filters


# --- Initial weights


@pytest.mark.parametrize("name", ["group1_block1_conv", "group2_block2_conv"])
def test_identity_init(name):
    layer = published(94).get_layer(name)
    kernel = layer.kernel.numpy()
    channels = kernel.shape[2]
    x = np.random.default_rng(0).normal(size=(2, 5, 6, channels)).astype("float32")
    y = layer(x).numpy()
    np.testing.assert_allclose(y[..., :channels], x, rtol=1e-6)
    random = kernel[..., channels:]
    if random.size:
        bound = (9 * channels) ** -0.5
        assert 0.99 * bound < np.abs(random).max() <= bound
        assert abs(random.std() / (bound / math.sqrt(3)) - 1) < 0.02


def test_identity_init_of_fewer_filters_than_channels():
    kernel = IdentityFilters()((3, 5, 4, 2)).numpy()
    assert kernel.shape == (3, 5, 4, 2)
    assert kernel[1, 2, 0, 0] == kernel[1, 2, 1, 1] == 1
    assert np.abs(kernel).sum() == 2


def test_initial_logits_are_pytorchs():
    kernel = published(94).get_layer("logits").kernel.numpy()
    assert kernel.shape == (256, 10)
    assert 0.99 / 16 < np.abs(kernel).max() <= 1 / 16


# --- Against NumPy


def reference(variables, convs=2, activation="gelu"):
    def block(name, steps):
        make = {
            "conv": lambda: Conv(variables, f"{name}_conv"),
            "pool": lambda: MaxPool(2),
            "bn": lambda: BatchNorm(variables, f"{name}_bn", 1e-12),
            "gelu": gelu,
            "silu": silu,
        }
        steps = steps.replace("gelu", activation)
        return Chain(*(make[word]() for word in steps.split("_")))

    def group(name):
        first = block(f"{name}_block1", "conv_pool_bn_gelu")
        second = block(f"{name}_block2", "conv_bn_gelu")
        if convs == 2:
            return Chain(first, second)
        return Chain(first, Residual(second, block(f"{name}_block3", "conv_bn")), gelu())

    return Chain(
        Conv(variables, "whitening", padding="valid"),
        gelu(),
        group("group1"),
        group("group2"),
        group("group3"),
        MaxPool(),
        Logits(variables, 1 / 9),
    )


@pytest.mark.parametrize(("size", "convs"), [pytest.param(94, 2, marks=pytest.mark.long), (96, 3)])
def test_equals_numpy(size, convs):
    model = airbench(size, width=4)
    assert_same_step(model, functools.partial(reference, convs=convs))


def test_silu_equals_numpy():
    model = airbench(94, width=4, activation="silu")
    assert_same_step(model, functools.partial(reference, activation="silu"))


@pytest.mark.long
def test_equals_numpy_under_xla():
    assert_same_step(airbench(94, width=4), reference, jit_compile=True)


@pytest.mark.long
def test_unknown_image_size():
    assert_same_step(airbench(94, 3, (None, None, 1), width=2), reference, shape=(8, 18, 13, 1))


# --- Integration


def test_features_feed_the_logits():
    model = airbench(94, width=4)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    features, logits = keras.Model(model.inputs, [models.features(model), *model.outputs])(images)
    assert features.shape == (2, 16)
    expected = features @ model.get_layer("logits").kernel / 9
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_layers_are_frozen_by_their_names():
    model = airbench(94, width=4)
    freeze(model, "group2")
    trained = {name_of(v).split("_")[0].split("/")[0] for v in model.trainable_variables}
    assert trained == {"group3", "logits"}


# --- Errors


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (93, {}, r"no size 93; the sizes are \(94, 95, 96, '96_proxy'\)"),
        (94, {"input_shape": (8, 32, 3)}, "airbench94: images of 8 x 32.*at least 9 x 9"),
        (94, {"activation": "relu"}, "no activation 'relu'.*use one of gelu, silu"),
        (95, {"width": -2}, "airbench95: width=-2 is negative"),
    ],
)
def test_invalid_arguments(size, options, message):
    with pytest.raises(UserError, match=message):
        airbench(size, **options)


def test_smallest_image():
    last = airbench(94, 3, (9, 9, 3), width=2).get_layer("group3_block2_gelu")
    assert last.output.shape[1:3] == (1, 1)
