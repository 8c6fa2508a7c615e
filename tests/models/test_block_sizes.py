"""Sizes of blocks, against blocks that were made."""

from __future__ import annotations

import resource

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.layers import Dropout
from imagenet_fast.models.block_sizes import block_kind, block_sizes


@keras.saving.register_keras_serializable("tests")
class Fork(keras.layers.Layer):
    """Returns a structure; counts how often it is built."""

    built_times = 0

    def build(self, input_shape):
        type(self).built_times += 1
        self.scale = self.add_weight(name="scale", shape=[], initializer="ones")
        self.seen = self.add_weight(name="seen", shape=(), dtype="int64", trainable=False)
        super().build(input_shape)

    def call(self, inputs):
        first = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
        return first * self.scale, tf.cast(first[:, :2], tf.float16)


def shapes(size):
    return [(x.shape.as_list(), x.dtype.name) for x in tf.nest.flatten(size.outputs)]


def test_counts_and_outputs():
    sizes = block_sizes(
        [
            keras.layers.Conv2D(4, 3, 2),
            keras.layers.BatchNormalization(),
            Dropout(0.5),
            keras.layers.Flatten(),
            Fork(),
        ],
        (9, 7, 3),
    )
    assert [size.trainable for size in sizes] == [9 * 3 * 4 + 4, 8, 0, 0, 1]
    assert [shapes(size) for size in sizes] == [
        *[[([None, 4, 3, 4], "float32")]] * 3,
        [([None, 48], "float32")],
        [([None, 48], "float32"), ([None, 2], "float16")],
    ]
    assert isinstance(sizes[-1].outputs, tuple)


def test_a_model_is_a_block_too():
    images = keras.Input((4, 4, 3))
    block = keras.Model(images, keras.layers.Dense(5)(keras.layers.Flatten()(images)))
    before = block.get_weights()
    (size,) = block_sizes([block], (4, 4, 3))
    assert size.trainable == 48 * 5 + 5
    # It keeps its weights.
    for a, b in zip(block.get_weights(), before):
        np.testing.assert_array_equal(a, b)


def test_blocks_stay_unbuilt_and_variables_as_usual():
    dense = keras.layers.Dense(3, bias_initializer="ones")
    block_sizes([dense], (2,))
    assert not dense.built
    dense(tf.zeros([1, 2]))
    np.testing.assert_array_equal(dense.bias, np.ones(3))


def test_each_kind_is_built_once():
    Fork.built_times = 0
    sizes = block_sizes([Fork(name=f"fork{i}") for i in range(5)], (3,))
    # The first takes one tensor, the others two.
    assert Fork.built_times == 2
    assert len(sizes) == 5
    # Of another configuration, or with other inputs, it is another kind.
    two = block_sizes([keras.layers.Dense(3), keras.layers.Dense(3), keras.layers.Dense(4)], (2,))
    assert [size.trainable for size in two] == [9, 12, 16]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_precision_of_the_block(policy):
    block = keras.layers.Dense(3, dtype=keras.mixed_precision.Policy(policy))
    (size,) = block_sizes([block], (2,))
    assert size.outputs.dtype.name == block.compute_dtype


@pytest.mark.long
def test_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    width = 4096
    blocks = [keras.layers.Dense(width + i) for i in range(40)]
    total = sum(size.trainable for size in block_sizes(blocks, (width,)))
    assert total > 40 * width**2
    # Of 2.5 GiB; one of the weights is 64 MiB, and memory is counted in KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18


def test_names_do_not_make_another_kind():
    def network(*names, filters=4):
        first, second, third = names
        x = images = keras.Input((8, 8, 3), name=first)
        x = keras.layers.Conv2D(filters, 3, name=second)(x)
        return keras.Model(images, keras.layers.Activation("relu", name=third)(x))

    specs = tf.TensorSpec((None, 8, 8, 3))
    kind = block_kind(network("a", "b", "c"), specs)
    assert block_kind(network("x", "relu", "z"), specs) != kind  # a name that says more
    assert block_kind(network("x", "y", "z"), specs) == kind
    assert block_kind(network("a", "b", "c", filters=5), specs) != kind
    assert block_kind(network("a", "b", "c"), tf.TensorSpec((2, 8, 8, 3))) != kind
