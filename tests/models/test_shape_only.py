"""Variables without memory, and random numbers that are left as they were."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.layers import Dropout
from imagenet_fast.models.shape_only import shape_only, spec_of


def test_yields_the_variables_in_their_order():
    with shape_only() as variables:
        dense = keras.layers.Dense(3, name="dense")
        keras.layers.BatchNormalization(name="norm").build((None, 2))
        dense(tf.zeros([1, 2]))
    norm = [f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")]
    names = [*norm, "dense/kernel", "dense/bias"]
    assert [name_of(variable) for variable in variables] == names
    assert variables[-1] is dense.bias.value


def test_large_variables_have_no_value():
    with shape_only():
        dense = keras.layers.Dense(100)
        dense.build((None, 100))
    kernel = dense.kernel
    assert kernel.shape == (100, 100)
    assert kernel.dtype == "float32"
    assert not tf.size(kernel.value.read_value())


def test_a_layer_may_compute_with_small_ones_while_it_is_built():
    with shape_only():
        keras.layers.Normalization()(keras.Input([8]))


def test_afterwards_variables_are_as_usual():
    with pytest.raises(ZeroDivisionError), shape_only():
        raise ZeroDivisionError
    dense = keras.layers.Dense(100, kernel_initializer="ones")
    dense.build((None, 100))
    np.testing.assert_array_equal(dense.kernel, np.ones([100, 100]))


def test_names_are_unaffected():
    def number():
        return int(keras.layers.Dense(2).name.rpartition("dense")[2].strip("_") or 0)

    before = number()
    with shape_only():
        assert [number(), number()] == [before + 1, before + 2]
    with pytest.raises(ZeroDivisionError), shape_only():
        number()
        raise ZeroDivisionError
    assert number() == before + 1


def test_random_numbers_are_unaffected():
    def drawn(between):
        keras.utils.set_random_seed(4)
        between()
        weights = keras.initializers.GlorotUniform()([2, 2]).numpy().tolist()
        return weights, random.random(), np.random.rand()

    def made():
        with shape_only():
            random.random()
            np.random.rand()
            Dropout(0.5)(keras.layers.RandomFlip()(keras.Input([4, 4, 3])))
            keras.initializers.GlorotUniform()([2, 2])
            keras.utils.set_random_seed(5)

    assert drawn(made) == drawn(lambda: None)


def test_spec_of_a_copy_in_another_replica():
    """Whose initial value is the first one's, as MirroredStrategy says it."""
    first = tf.Variable([1.0, 2.0])

    def initial_value():
        in_graph = not tf.executing_eagerly() and not tf.inside_function()
        return tf.identity(first.initial_value if in_graph else first.read_value())

    assert spec_of(initial_value=initial_value) == tf.TensorSpec([2], tf.float32)
    assert spec_of(initial_value=initial_value, dtype=tf.float16).dtype == tf.float16
