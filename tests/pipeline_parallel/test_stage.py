"""Blocks that follow each other, as in a Keras model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.stage import Stage

layers = keras.layers
VALUES = np.random.default_rng(0).normal(2.0, 3.0, (6, 4)).astype("float32")


class Plain(layers.Layer):
    """Has no ``training`` argument, and a layer inside that has."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, inputs):
        return self.norm(inputs) + 1


class Named(layers.Layer):
    def call(self, inputs, training=None):
        return inputs * (2.0 if training else 3.0)


class Needed(layers.Layer):
    def call(self, inputs, training):
        return inputs * (5.0 if training else 7.0)


class Any(layers.Layer):
    def call(self, inputs, **options):
        return inputs * (11.0 if options["training"] else 13.0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "block", [Plain, Named, Needed, Any, layers.BatchNormalization, lambda: layers.Dropout(1e-6)]
)
def test_training_reaches_a_block_as_it_does_in_a_model(block, training):
    block = block()
    model = keras.Sequential([keras.Input([4]), block])
    weights = model.get_weights()
    outputs = Stage([block], "/CPU:0")(tf.constant(VALUES), training)
    model.set_weights(weights)
    np.testing.assert_allclose(outputs, model(VALUES, training=training), rtol=1e-5)


def test_blocks_follow_each_other():
    blocks = [layers.Dense(3), layers.BatchNormalization(), keras.Sequential([layers.Dense(2)])]
    values = Stage(blocks, "/CPU:0")(VALUES)
    np.testing.assert_allclose(values, keras.Sequential(blocks)(VALUES), rtol=1e-6)


def test_what_is_trained():
    first, frozen, norm = layers.Dense(4), layers.Dense(4), layers.BatchNormalization()
    stage = Stage([first, keras.Sequential([frozen, norm])], "/CPU:0")
    stage(VALUES)
    frozen.trainable = False
    expected = [first.kernel, first.bias, norm.gamma, norm.beta]
    assert [own.ref() for own in stage.variables] == [own.ref() for own in expected]
    assert stage.norms == [norm]


def test_what_blocks_share_counts_once():
    shared = layers.Dense(4, kernel_regularizer="l2")
    norm = layers.BatchNormalization()
    stage = Stage([shared, norm, layers.ReLU(), shared, keras.Sequential([norm])], "/CPU:0")
    stage(VALUES)
    assert len(stage.variables) == 4
    assert stage.norms == [norm]
    assert len(stage.losses) == 1


def test_losses_are_those_of_the_last_call():
    stage = Stage([layers.Dense(4, activity_regularizer="l2"), layers.Dense(2)], "/CPU:0")
    assert stage.losses == []
    stage(VALUES)
    (once,) = stage.losses
    stage(2 * VALUES)
    (twice,) = stage.losses
    np.testing.assert_allclose(twice, 4 * once, rtol=1e-5)


def test_losses_of_each_call_of_a_layer_count():
    """As in a Keras model; the regularization of its weights counts once."""
    shared = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l1")
    blocks = [shared, layers.ReLU(), shared, keras.Sequential([shared])]
    inputs = keras.Input([4])
    outputs = inputs
    for block in blocks:
        outputs = block(outputs)
    model = keras.Model(inputs, outputs)
    model(VALUES)
    expected = np.sum(model.losses)
    stage = Stage(blocks, "/CPU:0")
    stage(VALUES)
    assert len(stage.losses) == 3 + 1
    np.testing.assert_allclose(np.sum(stage.losses), expected, rtol=1e-5)


@pytest.mark.parametrize("value", [3, None, tf.ragged.constant([[1.0]])])
def test_outputs_that_are_no_tensors(value):
    blocks = [layers.Dense(4), layers.Lambda(lambda x: (x, value), name="guilty")]
    kind = type(value).__name__
    with pytest.raises(UserError, match=f"block 'guilty' returns a value of type {kind}, but"):
        Stage(blocks, "/CPU:0")(VALUES)
