"""Counts of operations, against definitions and TensorFlow's own profiler."""

import keras
import pytest
import tensorflow as tf

from imagenet_fast.pipeline_parallel.flops import flops


def operations(call, *shapes):
    """The operations of a function of float tensors."""
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    return tf.function(call, autograph=False).get_concrete_function(*specs).graph.get_operations()


def counted(call, *shapes, padding=True):
    return flops(operations(call, *shapes), padding)


def gradients(call):
    """Of all arguments."""

    def own(*values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = call(*values)
        return tape.gradient(result, values)

    return own


# A multiplication and an addition for each weight and position.
CONVOLUTIONS = {
    "plain": (
        lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"),
        [(5, 9, 7, 6), (3, 1, 6, 8)],
        2 * (5 * 5 * 4 * 8) * (3 * 1 * 6),
    ),
    "in groups": (
        lambda x, w: tf.nn.conv2d(x, w, 1, "VALID"),
        [(5, 9, 7, 6), (3, 3, 2, 12)],
        2 * (5 * 7 * 5 * 12) * (3 * 3 * 2),
    ),
    "by channel": (
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
        [(5, 9, 7, 6), (3, 3, 6, 2)],
        2 * (5 * 9 * 7 * 12) * (3 * 3),
    ),
    "in three dimensions": (
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "VALID"),
        [(2, 5, 5, 5, 3), (3, 3, 3, 3, 4)],
        2 * (2 * 3**3 * 4) * (3**3 * 3),
    ),
    "a product": (lambda x, w: x @ w, [(5, 6), (6, 7)], 2 * 5 * 6 * 7),
    "a product of batches": (lambda x, w: x @ w, [(3, 5, 6), (3, 6, 7)], 2 * 3 * 5 * 6 * 7),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_multiplications(name):
    call, shapes, expected = CONVOLUTIONS[name]
    assert counted(call, *shapes) == expected


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_each_gradient_is_as_much(name):
    call, shapes, expected = CONVOLUTIONS[name]
    assert counted(gradients(call), *shapes) == 3 * expected


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("taps", [1, pytest.param(2, marks=pytest.mark.long), 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("dilation", "padding"), [(1, "SAME"), (1, "VALID"), (2, "SAME")])
def test_multiplications_within_the_image(size, taps, stride, dilation, padding):
    """As many as a convolution of ones by ones adds up."""
    if (padding == "VALID" and taps > size) or (dilation > 1 and stride > 1):
        pytest.skip("TensorFlow has no such convolution")

    def convolution(x, w):
        return tf.nn.conv2d(x, w, stride, padding, dilations=dilation)

    shapes = (2, size, size + 1, 3), (taps, 2, 3, 4)
    if padding == "VALID" and size + 1 < 2:
        pytest.skip("smaller than the filter")
    sums = convolution(tf.ones(shapes[0]), tf.ones(shapes[1]))
    expected = 2 * float(tf.reduce_sum(sums))
    assert counted(convolution, *shapes, padding=False) == expected
    assert counted(gradients(convolution), *shapes, padding=False) == 3 * expected


def test_explicit_padding():
    def convolution(x, w):
        return tf.nn.conv2d(x, w, 2, [[0, 0], [3, 2], [1, 3], [0, 0]])

    shapes = (2, 8, 9, 3), (7, 5, 3, 4)
    expected = 2 * float(tf.reduce_sum(convolution(tf.ones(shapes[0]), tf.ones(shapes[1]))))
    assert counted(convolution, *shapes, padding=False) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (tf.nn.relu, 64),
        (lambda x: x + 1.0, 64),
        (tf.reduce_mean, 64),
        (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), 64),
        (lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME"), 64 * 9),
        (lambda x: tf.nn.relu(tf.reshape(x, [4, 16])[:, :3]), 12),
        (lambda x: tf.transpose(tf.concat([x, tf.pad(x, [[0, 0]] * 4)], 0)), 0),
        (lambda x: tf.raw_ops.Shape(input=x) + 1, 0),
    ],
)
def test_values(call, expected):
    assert counted(call, (1, 4, 4, 4)) == expected


def test_batch_norm():
    ones = tf.ones([4])

    def norm(x):
        return tf.compat.v1.nn.fused_batch_norm(x, ones, ones)[0]

    forward = counted(norm, (2, 4, 4, 4))
    assert 5 * 128 <= forward <= 10 * 128
    assert 2 * forward <= counted(gradients(norm), (2, 4, 4, 4)) <= 4 * forward


def test_is_what_tensorflow_counts():
    """Of convolutions and dense layers, which is nearly all of a network."""
    network = keras.Sequential(
        [
            keras.Input((32, 32, 3), 4),
            keras.layers.Conv2D(16, 3, 2, use_bias=False),
            keras.layers.SeparableConv2D(16, 5, use_bias=False),
            keras.layers.Flatten(),
            keras.layers.Dense(10, use_bias=False),
        ]
    )
    function = tf.function(network).get_concrete_function(tf.TensorSpec([4, 32, 32, 3]))
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    theirs = tf.compat.v1.profiler.profile(function.graph, options=options).total_float_ops
    assert flops(function.graph.get_operations()) == theirs
