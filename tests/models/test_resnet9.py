"""ResNet-9 against Page's counts and a network in NumPy."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy_network import (
    BatchNorm,
    Chain,
    Conv,
    Logits,
    MaxPool,
    Residual,
    assert_same_step,
    celu,
    randomise,
    relu,
    step,
)

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models.options import CHOICES
from imagenet_fast.models.resnet9 import CELU, resnet9
from imagenet_fast.training.build.fine_tune import freeze

# Page's network after all of the tricks that change it.
TRICKS = {
    "pool_order": "conv_pool_bn_relu",
    "activation": "celu",
    "celu_alpha": 0.3,
    "batch_norm_scale": False,
    "logits_scale": 1 / 16,
    "whitening": True,
}


@functools.cache
def published():
    """One for the tests that only look."""
    keras.utils.set_random_seed(0)
    return resnet9()


def size(variables):
    return sum(math.prod(v.shape) for v in variables)


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


# --- Page's network


def test_counts():
    model = published()
    assert size(model.trainable_variables) == 6_573_120
    assert len(layers_of(model, keras.layers.Conv2D)) + 1 == 9
    norms = layers_of(model, keras.layers.BatchNormalization)
    assert size(norm.gamma for norm in norms) == size(norm.beta for norm in norms) == 2_240
    assert model.get_layer("logits").kernel.shape == (512, 10)


def test_counts_with_whitening_and_frozen_scale():
    model = resnet9(**TRICKS)
    assert size(model.trainable_variables) == 6_570_880
    assert size(model.get_layer("whitening").weights) == 729
    assert not model.get_layer("whitening").trainable_weights
    assert model.get_layer("prep_conv").kernel.shape == (1, 1, 27, 64)


def test_sizes_of_the_images():
    model = published()
    names = ("prep_relu", "layer1_pool", "layer1_add", "layer2_pool", "layer3_pool", "layer3_add")
    assert [model.get_layer(name).output.shape[1:] for name in names] == [
        (32, 32, 64),
        (16, 16, 128),
        (16, 16, 128),
        (8, 8, 256),
        (4, 4, 512),
        (4, 4, 512),
    ]


def test_initial_weights_are_pytorchs():
    model = published()
    for name, fan_in in (("prep_conv", 27), ("layer2_conv", 9 * 128), ("logits", 512)):
        kernel = model.get_layer(name).kernel.numpy()
        bound = fan_in**-0.5
        assert 0.99 * bound < np.abs(kernel).max() <= bound
        # Of a uniform distribution.
        assert abs(kernel.std() / (bound / math.sqrt(3)) - 1) < 0.05
    assert not any(getattr(layer, "use_bias", False) for layer in model.layers)


def test_width_is_in_proportion():
    model = resnet9(width=3)
    names = ("prep_conv", "layer1_conv", "layer2_conv", "layer3_residual2_conv")
    assert [model.get_layer(name).filters for name in names] == [3, 6, 12, 24]


# --- Against NumPy


def reference(variables, *, order="conv_bn_relu_pool", activation=relu, ghost=None, scale=0.125):
    """Page's network; order says where the pool is."""

    def block(name, steps="conv_bn_relu"):
        make = {
            "conv": lambda: Conv(variables, f"{name}_conv"),
            "bn": lambda: BatchNorm(variables, f"{name}_bn", 1e-5, ghost),
            "relu": activation,
            "pool": lambda: MaxPool(2),
        }
        return Chain(*(make[word]() for word in steps.split("_")))

    def residual(name):
        return Residual(block(f"{name}_residual1"), block(f"{name}_residual2"))

    whitening = [Conv(variables, "whitening")] if "whitening/kernel" in variables else []
    return Chain(
        *whitening,
        block("prep"),
        block("layer1", order),
        residual("layer1"),
        block("layer2", order),
        block("layer3", order),
        residual("layer3"),
        MaxPool(),
        Logits(variables, scale),
    )


@pytest.mark.parametrize(
    "order",
    # The third is that of the network with all tricks.
    [*CHOICES["pool_order"][:2], pytest.param(CHOICES["pool_order"][2], marks=pytest.mark.long)],
)
def test_baseline_equals_numpy(order):
    model = resnet9(width=4, pool_order=order)
    assert_same_step(model, functools.partial(reference, order=order))


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.long)])
def test_all_tricks_equal_numpy(xla):
    model = resnet9(width=4, ghost_batch_size=4, **TRICKS)
    assert_same_step(
        model,
        functools.partial(
            reference,
            order="conv_pool_bn_relu",
            activation=lambda: celu(0.3),
            ghost=4,
            scale=1 / 16,
        ),
        jit_compile=xla,
    )


@pytest.mark.long
def test_unknown_image_size():
    model = resnet9(3, (None, None, 1), width=2)
    assert_same_step(model, reference, shape=(8, 19, 13, 1))


@pytest.mark.long
def test_pool_after_relu_or_before_it_is_the_same_function():
    images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    labels = np.arange(8)
    steps = []
    for order in CHOICES["pool_order"]:
        model = resnet9(width=4, pool_order=order)
        randomise(model)
        steps.append(step(model, images, labels))
    (logits, _, gradients), (same, _, same_gradients), (other, _, _) = steps
    np.testing.assert_allclose(same, logits, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(same_gradients[name], gradient, rtol=0, atol=1e-5)
    assert np.abs(other - logits).max() > 0.01


def test_frozen_scales_of_one_and_a_quarter_are_equivalent():
    options = {"width": 4, "pool_order": "conv_pool_bn_relu", "activation": "celu"}
    quarter = resnet9(celu_alpha=0.075, logits_scale=0.5, **options)
    one = resnet9(celu_alpha=0.3, logits_scale=0.125, batch_norm_scale=False, **options)
    randomise(one)
    for layer in one.layers:
        twin = quarter.get_layer(layer.name)
        if isinstance(layer, keras.layers.BatchNormalization):
            twin.beta.assign(layer.beta / 4)
            twin.gamma.assign(tf.fill(twin.gamma.shape, 0.25))
        else:
            twin.set_weights(layer.get_weights())
    images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    np.testing.assert_allclose(
        quarter(images, training=True), one(images, training=True), rtol=1e-3, atol=1e-3
    )


# --- CELU


@pytest.mark.parametrize(
    ("alpha", "x", "y"), [(0.3, -1, -0.2892978), (0.3, -0.1, -0.0850406), (0.075, -0.1, -0.0552302)]
)
def test_celu(alpha, x, y):
    np.testing.assert_allclose(CELU(alpha)(tf.constant([x, 0, 2.5])), [y, 0, 2.5], atol=1e-7)


@pytest.mark.parametrize("xla", [False, True])
def test_celu_and_its_gradient_far_out(xla):
    x = tf.constant([-1e30, -1e4, -100, -1, -1e-4, 0, 1e-4, 1, 100, 1e4, 1e30])
    layer = CELU(0.075)

    @tf.function(jit_compile=xla)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x, 3 * tf.ones_like(x))

    y, dx = gradient(x)
    exact = celu(0.075)
    wide = x.numpy().astype(np.float64)
    np.testing.assert_allclose(y, exact.forward(wide), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dx, exact.backward(3 * np.ones(11)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_celu_in_half_precision(dtype):
    x = tf.linspace(-2.0, 2.0, 101)
    y = CELU(0.3, dtype=dtype)(x)
    assert y.dtype == dtype
    exact = celu(0.3).forward(x.numpy().astype(np.float64))
    np.testing.assert_allclose(tf.cast(y, "float64"), exact, rtol=2**-6, atol=2**-9)


@pytest.mark.parametrize("alpha", [0, -1, math.nan])
def test_celu_alpha_out_of_range(alpha):
    with pytest.raises(UserError, match=f"alpha={alpha}"):
        CELU(alpha)


@pytest.mark.parametrize(
    "file",
    [
        "model.keras",
        pytest.param("model.h5", marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_saving_with_all_tricks(file, tmp_path):
    model = resnet9(width=2, ghost_batch_size=4, **TRICKS)
    randomise(model)
    model.save(tmp_path / file)
    again = keras.models.load_model(tmp_path / file, compile=False)
    images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    for training in (False, True):
        np.testing.assert_allclose(
            again(images, training=training), model(images, training=training), rtol=1e-5, atol=1e-6
        )


# --- Integration


def test_features_feed_the_logits():
    model = resnet9(width=4)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    both = keras.Model(model.inputs, [models.features(model), *model.outputs])
    features, logits = both(images)
    last = keras.Model(model.inputs, model.get_layer("layer3_add").output)(images)
    np.testing.assert_array_equal(features, tf.reduce_max(last, [1, 2]))
    np.testing.assert_allclose(
        logits, 0.125 * features @ model.get_layer("logits").kernel, rtol=1e-5, atol=1e-6
    )


def test_layers_are_frozen_by_their_names():
    model = resnet9(width=4, whitening=True)
    freeze(model, "layer1")
    trained = {name_of(v).split("_")[0].split("/")[0] for v in model.trainable_variables}
    assert trained == {"layer2", "layer3", "logits"}
    with pytest.raises(UserError, match=r"its parts are .*layer3$"):
        freeze(model, "layer4")


# --- Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pool_order": "pool_conv_bn_relu"},
            "no pool_order 'pool_conv_bn_relu'.*use one of conv_",
        ),
        ({"activation": "selu"}, "no activation 'selu'; did you mean .*celu"),
        ({"activation": "celu", "celu_alpha": 0.0}, "alpha=0.0"),
        ({"width": -1}, "width=-1 is negative; use 0"),
        ({"input_shape": (32, 7, 3)}, "32 x 7 pixels.*at least 8 x 8"),
        ({"input_shape": (None, 7, 3)}, "at least 8 x 8"),
        ({"ghost_batch_size": -1}, "ghost_batch_size"),
        ({"ghost_batch_size": 32, "batch_norm_group_size": 2}, "of 2 replicas together; leave out"),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(UserError, match=message):
        resnet9(**options)


def test_smallest_image():
    assert resnet9(3, (8, 8, 3), width=2).get_layer("layer3_add").output.shape[1:3] == (1, 1)
