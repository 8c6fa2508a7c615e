"""Rematerialization: the same step, and less memory."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from rematerialization_job import compare, network, regularized
from small_config import SMALL

from imagenet_fast import UserError, build_model
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.training.step.rematerialization import Rematerialization

pytestmark = pytest.mark.skipif(KERAS_2, reason="needs Keras 3")

JOB = pathlib.Path(__file__).with_name("rematerialization_job.py")
ONE = {"strategy": "one_device", "image_size": 16}


@pytest.mark.parametrize(
    ("options", "custom", "tolerance"),
    [
        (ONE, network, 0),
        ({**ONE, "accumulation_steps": 2, "mixup_alpha": 0.2}, network, 0),
        ({**ONE, "model": "resnet8", "precision": "mixed_float16"}, None, 0),
        # Otherwise the terms of a sum come in another order.
        (ONE, regularized, 1e-5),
        ({**ONE, "xla": True}, network, 1e-5),
    ],
    ids=["own", "accumulation", "float16", "regularized", "xla"],
)
def test_gradients_metrics_and_states_are_the_same(options, custom, tolerance):
    plain, again, model = compare(options, custom)
    assert len(model.rematerialization.segments) > 2
    assert len(plain) == len(again) > 20
    for expected, found in zip(plain, again):
        np.testing.assert_allclose(found, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.slow
def test_of_two_replicas(run_python):
    options = {
        "strategy": "mirrored",
        "logical_cpus": 2,
        "image_size": 16,
        "accumulation_steps": 2,
    }
    run_python([JOB, json.dumps(options)])


def chain(blocks, image_shape=(8, 8, 3), filters=4):
    x = images = keras.Input(image_shape)
    for number in range(blocks):
        x = keras.layers.Conv2D(filters, 3, padding="same", name=f"conv{number}")(x)
    return keras.Model(images, x)


@pytest.mark.parametrize("image_shape", [(8, 8, 3), (None, None, 3)])
def test_of_n_equal_blocks_about_the_root_are_stored(image_shape):
    segments = Rematerialization(chain(25, image_shape)).segments
    assert [len(segment) for segment in segments] == [5] * 5


def test_segments_have_fewer_blocks_where_activations_are_large():
    x = images = keras.Input((32, 32, 3))
    for _ in range(6):
        x = keras.layers.Conv2D(4, 3, padding="same")(x)
    x = keras.layers.MaxPool2D(4)(x)
    for _ in range(12):
        x = keras.layers.Conv2D(4, 3, padding="same")(x)
    lengths = [len(own) for own in Rematerialization(keras.Model(images, x)).segments]
    assert lengths[0] < lengths[-1]


def test_a_model_inside_is_cut_too():
    inner = chain(9)
    images = keras.Input((8, 8, 3))
    model = keras.Model(images, keras.layers.Flatten()(inner(images)))
    assert [len(segment) for segment in Rematerialization(model).segments] == [5, 5]


def test_activations_are_computed_twice_and_most_do_not_wait_for_the_loss():
    found = {}
    for rematerialize in ("except_last", "always"):
        model = build_model(SMALL.replace(model="resnet20", rematerialize=rematerialize))
        batch = tf.zeros((32, 16, 16, 3), tf.uint8), tf.zeros(32, tf.int32), tf.ones(32)
        graph = tf.function(model.gradients, autograph=False).get_concrete_function(batch).graph
        norms = [own for own in graph.get_operations() if own.type == "FusedBatchNormV3"]
        found[rematerialize] = len(norms), waiting_for_the_loss(graph)
    (norms, plain), (twice, again) = found["except_last"], found["always"]
    last = sum(
        "bn" in layer.name
        for block in model.rematerialization.segments[-1]
        for layer in block.layers
    )
    assert twice == 2 * norms - last
    assert again < plain / 2


def waiting_for_the_loss(graph):
    """Returns the bytes of an image's activations that are used before the loss and after it."""
    loss = next(
        own for own in graph.get_operations() if own.type.startswith("SparseSoftmaxCrossEntropy")
    )
    before = behind(loss)
    kept = {
        tensor.name: tensor
        for own in graph.get_operations()
        if own not in before
        for tensor in own.inputs
        if tensor.op in before and tensor.shape.rank == 4 and tensor.shape[0] == 32
    }
    return sum(np.prod(tensor.shape[1:]) * tensor.dtype.size for tensor in kept.values())


def behind(operation):
    found, waiting = set(), [operation]
    while waiting:
        own = waiting.pop()
        if own not in found:
            found.add(own)
            waiting.extend(tensor.op for tensor in own.inputs)
    return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subclass(), "cannot be cut into blocks, only a functional Keras model with one"),
        (lambda: dense_to_all(), "because there is no layer on whose outputs alone"),
    ],
)
def test_networks_that_cannot_be_cut(make, message):
    with pytest.raises(UserError, match=message):
        Rematerialization(make())


class Subclass(keras.Model):
    def call(self, inputs):
        return inputs


def dense_to_all():
    """The image is used up to the last layer."""
    x = images = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(3, 3, padding="same")(x)
    return keras.Model(images, keras.layers.Add()([x, images]))


class Doubled(keras.Model):
    """A functional model with a call of its own."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


class Counting(keras.layers.Layer):
    """Has a weight that its call changes in training."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.factor.assign(self.factor * 1.5)
        return inputs * self.factor


def with_inside(inner):
    images = keras.Input((8, 8, 3))
    x = inner(images)
    x = x["features"] if isinstance(x, dict) else x
    x = keras.layers.Add()(x) if isinstance(x, list) else x
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    return keras.Model(images, keras.layers.Dense(5)(keras.layers.Flatten()(x)))


def inside(outputs_of, kind=keras.Model):
    x = images = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    return with_inside(kind(images, outputs_of(x, keras.layers.Conv2D(4, 1)(x))))


def changing(layer):
    x = images = keras.Input((8, 8, 3))
    for _ in range(3):
        x = layer(keras.layers.Conv2D(4, 3, activation="relu"))(x)
    return keras.Model(images, keras.layers.Dense(5)(keras.layers.Flatten()(x)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: inside(lambda x, y: [x, y]),
        lambda: inside(lambda x, y: {"features": y}),
        lambda: inside(lambda x, y: y, Doubled),
        lambda: changing(keras.layers.SpectralNormalization),
        lambda: changing(lambda layer: keras.Sequential([layer, Counting()])),
    ],
    ids=["two_outputs", "dict", "call_of_its_own", "spectral", "counting"],
)
def test_of_other_networks_the_gradients_are_those_of_a_tape(make):
    keras.utils.set_random_seed(0)
    model = make()
    images = tf.random.stateless_normal((4, 8, 8, 3), (1, 2))
    start = model.get_weights()

    def loss(logits):
        return tf.reduce_mean(logits**2)

    @tf.function(autograph=False)
    def plain():
        with tf.GradientTape() as tape:
            total = loss(model(images, training=True))
        return tape.gradient(total, model.trainable_variables)

    rematerialization = Rematerialization(model)

    @tf.function(autograph=False)
    def again():
        scale = tf.constant(1.0)
        return rematerialization.gradients(images, loss, scale, model.trainable_variables)[0]

    expected = [*plain(), *model.get_weights()]
    model.set_weights(start)
    for one, other in zip(expected, [*again(), *model.get_weights()]):
        np.testing.assert_array_equal(one, other)


def test_a_model_with_a_call_of_its_own_is_refused():
    images = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(keras.layers.Conv2D(4, 3)(images))
    model = Doubled(images, keras.layers.Dense(5)(x))
    with pytest.raises(UserError, match="without a call of its own"):
        Rematerialization(model)
