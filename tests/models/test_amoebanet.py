"""AmoebaNets against the published counts and a network in NumPy."""

from __future__ import annotations

import functools
import math
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf
from block_sizes import block_sizes
from numpy_amoebanet import AmoebaNet

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in, name_of
from imagenet_fast.models import features
from imagenet_fast.models.amoebanet import (
    AmoebaCell,
    AmoebaClassifier,
    amoebanet,
    amoebanet_blocks,
)

IMAGENET = (224, 224, 3)
NORM = {"momentum": 0.9, "epsilon": 1e-5, "group_size": 1, "ghost_batch_size": 0}

# GPipe's (L, D), and the parameters of torchgpipe's networks, which round to those of the paper.
PUBLISHED = {
    (18, 208): 81_505_540,
    (18, 416): 319_024_120,
    (18, 544): 542_734_840,
    (36, 544): 1_055_832_376,
    (72, 512): 1_844_858_344,
}
# The same, of each block of (18, 256).
PER_BLOCK = [
    *(1_856, 74_304, 343_168),
    *(676_096, 839_936, *[905_472] * 4),
    1_956_096,
    *(2_826_752, 3_351_040, *[3_613_184] * 4),
    7_811_584,
    *(11_289_600, 13_386_752, *[14_435_328] * 4),
    4_097_000,
]


@functools.cache
def small(variant):
    """One for the tests that only look, and for those that set its weights."""
    keras.utils.set_random_seed(0)
    return amoebanet(variant, 5, (None, None, 3), normal_cells=3, cell_filters=8)


def images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def randomise(variables, seed=0):
    """Gives every variable, batch norm statistics included, values that matter."""
    rng = np.random.default_rng(seed)
    for variable in variables:
        role = name_of(variable).split("/")[-1]
        if role == "depthwise_kernel":
            values = rng.normal(0, math.prod(variable.shape[:2]) ** -0.5, variable.shape)
        elif "kernel" in role:
            values = rng.normal(0, math.prod(variable.shape[:-1]) ** -0.5, variable.shape)
        elif role in ("gamma", "moving_variance"):
            values = rng.uniform(0.5, 1.5, variable.shape)
        else:
            values = rng.normal(0, 0.2, variable.shape)
        variable.assign(values)


def layers_of(model, kind):
    return [layer for layer in layers_in(model) if isinstance(layer, kind)]


def chained(blocks, shape=(None, None, 3)):
    x = inputs = keras.Input(shape)
    for block in blocks:
        x = block(x)
    return keras.Model(inputs, x)


def two_cells():
    """With all operations of both variants between them."""
    keras.utils.set_random_seed(0)
    model = chained(
        [
            AmoebaCell("b", True, 8, "project", NORM, name="first"),
            AmoebaCell("d", False, 8, "halve", NORM, name="second"),
        ],
        (6, 6, 3),
    )
    randomise(model.weights)
    return model


def cell(variant, reduction, filters=8, before="project", **norm):
    return AmoebaCell(variant, reduction, filters, before, {**NORM, **norm}, name="cell")


# --- Counts and shapes


@pytest.mark.long
@pytest.mark.parametrize("size", PUBLISHED)
def test_published_counts(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = block_sizes(amoebanet_blocks("d", *size), IMAGENET)
    assert sum(block.trainable for block in sizes) == PUBLISHED[size]
    # Up to 7 GiB of weights. In KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


@pytest.mark.long
def test_counts_and_shapes_by_block():
    blocks = amoebanet_blocks("d", 18, 256)
    sizes = block_sizes(blocks, IMAGENET)
    assert [block.trainable for block in sizes] == PER_BLOCK
    assert [block.name for block in blocks[:4]] == ["stem1", "stem2", "stem3", "stage1_cell1"]
    assert [block.name for block in blocks[-3:]] == ["stage3_cell5", "stage3_cell6", "classify"]

    stem1, *cells, logits = [block.outputs for block in sizes]
    assert stem1.shape.as_list() == [None, 112, 112, 64]
    assert logits.shape.as_list() == [None, 1000]
    # A normal cell returns four times its filters, a reduction cell three times.
    expected = [(56, 3 * 128), (28, 3 * 256), *[(28, 4 * 256)] * 6]
    expected += [(14, 3 * 512), *[(14, 4 * 512)] * 6, (7, 3 * 1024), *[(7, 4 * 1024)] * 6]
    assert [(x.shape[1], x.shape[3]) for x, _ in cells] == expected
    # The second state is the first of the block before.
    assert [x.shape for _, x in cells] == [stem1.shape, *(x.shape for x, _ in cells[:-1])]


@pytest.mark.long
@pytest.mark.parametrize(("size", "count"), [((3, 64), 1_541_066), ((6, 32), 679_578)])
def test_counts_of_small_networks(size, count):
    model = amoebanet("d", 10, (32, 32, 3), normal_cells=size[0], cell_filters=size[1])
    assert sum(math.prod(v.shape) for v in model.trainable_variables) == count
    assert model.name == "amoebanet_d"


@pytest.mark.long
def test_count_of_b_is_near_the_published():
    sizes = block_sizes(amoebanet_blocks("b", 18, 512), (480, 480, 3))
    count = sum(block.trainable for block in sizes)
    assert count == 560_053_608
    # All that is published.
    assert abs(count / 557e6 - 1) < 0.006


# --- Outputs


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        pytest.param("b", (2, 45, 51, 3), marks=pytest.mark.long),
        ("d", (2, 64, 32, 3)),
        pytest.param("b", (2, 64, 32, 3), marks=pytest.mark.long),
        pytest.param("d", (2, 45, 51, 3), marks=pytest.mark.long),
    ],
)
def test_equals_the_network_in_numpy(variant, shape):
    model = small(variant)
    randomise(model.weights)
    # Offset, so that a ReLU of the images would show.
    x = images(*shape) - 0.5
    expected = AmoebaNet(variant, model.weights).logits(x.astype("float64"), stages=1)
    assert expected.std() > 0
    np.testing.assert_allclose(
        model(x, training=False), expected, rtol=0, atol=2e-5 * np.abs(expected).max()
    )


@pytest.mark.long
@pytest.mark.parametrize("variant", ["b", "d"])
def test_blocks_one_after_another_are_the_model(variant):
    blocks = amoebanet_blocks(variant, 3, 8, 5)
    assert len(blocks) == 3 + 6
    assert not any(block.weights for block in blocks)
    chain = chained(blocks)
    model = small(variant)
    randomise(model.weights)
    chain.set_weights(model.get_weights())

    x = images(4, 32, 32, 3)
    for training in (False, True):
        np.testing.assert_allclose(
            chain(x, training=training), model(x, training=training), rtol=1e-4, atol=1e-5
        )
    # The moving averages.
    for a, b in zip(chain.weights, model.weights):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients():
    model = small("d")
    randomise(model.weights)
    with tf.GradientTape() as tape:
        logits = model(images(4, 64, 64, 3), training=True)
        loss = tf.reduce_mean(tf.square(logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients):
        assert np.isfinite(gradient).all(), variable.name
        assert np.any(gradient), variable.name


def test_average_pool_excludes_padding():
    average = cell("d", False).operations[8]
    np.testing.assert_allclose(average(np.full((1, 4, 5, 2), 3.0, "float32")), 3)
    x = np.zeros((1, 4, 4, 1), "float32")
    x[0, 0, 0] = 36
    # In a corner 4 pixels are inside, at an edge 6.
    np.testing.assert_allclose(
        average(x)[0, :, :, 0], [[9, 6, 0, 0], [6, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    )


def test_max_pool_is_a_maximum():
    maximum = cell("d", False).operations[1]
    x = np.full((1, 4, 4, 1), -5.0, "float32")
    x[0, 0, 0] = -1
    expected = np.full((4, 4), -5)
    expected[:2, :2] = -1
    np.testing.assert_array_equal(maximum(x)[0, :, :, 0], expected)


@pytest.mark.parametrize("shape", [(2, 6, 8, 5), (2, 7, 5, 5)])
def test_halving_takes_even_and_odd_pixels(shape):
    halve = cell("d", False, before="halve").projections[1]
    x = images(*shape)
    halve(x)
    randomise(halve.weights)
    values = {name_of(v).split("cell_input2_")[-1]: v.numpy() for v in halve.weights}
    positive = np.maximum(x, 0)
    expected = np.zeros((2, -(-shape[1] // 2), -(-shape[2] // 2), 8))
    for row in range(expected.shape[1]):
        for column in range(expected.shape[2]):
            first = positive[:, 2 * row, 2 * column]
            expected[:, row, column, :4] = first @ values["conv11/kernel"][0, 0]
            if 2 * row + 1 < shape[1] and 2 * column + 1 < shape[2]:
                second = positive[:, 2 * row + 1, 2 * column + 1]
                expected[:, row, column, 4:] = second @ values["conv12/kernel"][0, 0]
    expected -= values["bn1/moving_mean"]
    expected /= np.sqrt(values["bn1/moving_variance"] + 1e-5)
    expected = expected * values["bn1/gamma"] + values["bn1/beta"]
    np.testing.assert_allclose(halve(x), expected, rtol=1e-4, atol=1e-5)


def test_initial_weights_are_googles():
    own = cell("d", True, 256)
    own(images(1, 4, 4, 64))
    by_name = {layer.name: layer for layer in layers_of(own, keras.layers.Conv2D)}
    for name, fan_out in (
        ("cell_input1_conv1", 256),
        ("cell_operation4_conv2", 9 * 64),
        ("cell_operation5_conv2", 7 * 64),
    ):
        kernel = by_name[name].kernel.numpy()
        std = math.sqrt(2 / fan_out)
        assert abs(kernel.std() / std - 1) < 0.03
        # Truncated at two standard deviations of a distribution that this makes narrower.
        assert np.abs(kernel).max() < 2.28 * std
    kernels = [v.numpy().ravel()[:100].tobytes() for v in own.weights if "kernel" in v.name]
    assert len(kernels) == len(set(kernels)) == 10

    classifier = AmoebaClassifier(100)
    classifier((images(1, 4, 4, 64), images(1, 8, 8, 16)))
    # The same rule; its output channels are the classes.
    assert abs(classifier.logits.kernel.numpy().std() / math.sqrt(2 / 100) - 1) < 0.05
    assert not classifier.logits.bias.numpy().any()


def test_features_feed_the_logits():
    model = small("d")
    logits = model.get_layer("logits")
    x = images(2, 32, 32, 3)
    average = keras.Model(model.inputs, features(model))(x)
    assert average.shape == (2, 4 * 4 * 8)
    np.testing.assert_allclose(
        average.numpy() @ logits.kernel.numpy() + logits.bias, model(x), rtol=1e-5, atol=1e-6
    )


# --- XLA, precision and saving


@pytest.mark.long
def test_xla():
    model = two_cells()

    def step(x):
        with tf.GradientTape() as tape:
            outputs, _ = model(x, training=False)
            loss = tf.reduce_sum(tf.square(outputs))
        return loss, *tape.gradient(loss, model.trainable_variables)

    x = images(2, 6, 6, 3)
    compiled = tf.function(step, jit_compile=True)
    for a, b in zip(compiled(x), step(x)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.mark.long
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_layers_have_the_policy_in_which_they_were_made(policy):
    own = keras.mixed_precision.Policy(policy)
    keras.mixed_precision.set_global_policy(own)
    try:
        blocks = amoebanet_blocks("d", 3, 8, 5)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    state = images(2, 32, 32, 3)
    for block in blocks:
        again = type(block).from_config(block.get_config())
        layers = [x for x in layers_in(again) if isinstance(x, keras.layers.Layer)]
        assert {x.compute_dtype for x in layers if x.name != "logits"} == {own.compute_dtype}
        state = block(state)
        dtypes = {x.dtype.name for x in tf.nest.flatten(state)}
        assert dtypes == {"float32" if block.name == "classify" else own.compute_dtype}
        assert {tf.as_dtype(weight.dtype).name for weight in block.weights} == {"float32"}


@pytest.mark.long
@pytest.mark.parametrize("file", ["model.keras", "model.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_saving_cells(file, tmp_path):
    model = two_cells()
    model.save(tmp_path / file)
    again = keras.models.load_model(tmp_path / file, compile=False)
    x = images(2, 6, 6, 3)
    for a, b in zip(again(x), model(x)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_saving(tmp_path):
    model = small("b")
    randomise(model.weights)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", compile=False)
    x = images(2, 17, 17, 3)
    np.testing.assert_allclose(again(x), model(x), rtol=1e-5, atol=1e-6)


def test_each_convolution_has_a_batch_norm_with_the_options():
    own = cell("d", True, before="halve", momentum=0.75, epsilon=0.01, ghost_batch_size=4)
    norms = layers_of(own, keras.layers.BatchNormalization)
    convs = layers_of(own, keras.layers.Conv2D)
    # But for the two that halve, which share one.
    assert (len(convs), len(norms)) == (11, 10)
    assert {(n.momentum, n.epsilon, n.ghost_batch_size) for n in norms} == {(0.75, 0.01, 4)}
    assert not any(conv.use_bias for conv in convs)


# --- Errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("c",), {}, r"no variant 'c'; the variants are \('b', 'd'\)"),
        (("d",), {"normal_cells": 4}, "normal_cells=4, but must be a multiple of 3"),
        (("d",), {"normal_cells": 0}, "normal_cells=0, but must be a multiple of 3"),
        (("d",), {"cell_filters": 20}, "cell_filters=20, but must be a multiple of 8"),
        (("d",), {"cell_filters": -8}, "cell_filters=-8, but must be a multiple of 8"),
        (("b", 10, (16, 32, 3)), {}, "16 x 32 pixels are too small.*17 x 17"),
        (("b", 10, (None, 16, 3)), {}, "at least 17 x 17"),
        (("d",), {"ghost_batch_size": 32, "batch_norm_group_size": 2}, "leave out one of the two"),
    ],
)
def test_invalid_arguments(arguments, options, message):
    with pytest.raises(UserError, match=message):
        amoebanet(*arguments, **options)


@pytest.mark.long
def test_smallest_image():
    model = amoebanet("d", 3, (17, 17, 3), normal_cells=3, cell_filters=8)
    first, second = model.get_layer("stage3_cell1").output
    assert first.shape[1:3] == second.shape[1:3] == (1, 1)
    # So that the last reduction has something to reduce.
    assert model.get_layer("stage2_cell1").output[0].shape[1:3] == (2, 2)
