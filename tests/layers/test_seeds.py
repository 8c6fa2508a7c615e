"""Seeds of random operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.layers.seeds import UnseededDraws

pytestmark = pytest.mark.skipif(KERAS_2, reason="of Keras 3")


def draws(key, step, count=2):
    unseeded = UnseededDraws(key)

    @tf.function
    def draw(step):
        with unseeded.of_step(step):
            return [keras.random.uniform((4,)) for _ in range(count)]

    return np.array(draw(tf.constant(step)))


def test_draws_without_a_seed_are_a_function_of_key_and_step():
    first = draws(3, 7)
    np.testing.assert_array_equal(draws(3, 7), first)
    others = [first[1], draws(3, 8)[0], draws(4, 7)[0], draws(3, 7, 3)[2]]
    assert all(np.abs(other - first[0]).max() > 0 for other in others)


def test_the_global_generator_is_restored():
    keras.utils.set_random_seed(5)
    expected = [keras.random.uniform((2,)).numpy() for _ in range(2)]
    keras.utils.set_random_seed(5)
    found = [keras.random.uniform((2,)).numpy()]
    draws(0, 0)
    found.append(keras.random.uniform((2,)).numpy())
    np.testing.assert_array_equal(found, expected)
