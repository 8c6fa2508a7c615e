"""The loss of distillation, and what the teacher sees."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import rel_entr, softmax
from small_config import SMALL

from imagenet_fast import build_model
from imagenet_fast.training.step.distillation import Teacher


def teacher(model=None, temperature=1.0):
    return Teacher(model, temperature, "a teacher", 0)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_losses_and_gradients_are_those_of_the_formula(temperature):
    random = np.random.default_rng(0)
    student, wanted = random.normal(0, 5, (2, 6, 10))
    p, q = (softmax(logits / temperature, axis=-1) for logits in (wanted, student))
    logits = tf.constant(student, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = teacher(temperature=temperature).losses(logits, tf.constant(wanted, tf.float32))
    np.testing.assert_allclose(losses, temperature**2 * rel_entr(p, q).sum(axis=-1), rtol=1e-5)
    gradients = tape.gradient(losses, logits)
    np.testing.assert_allclose(gradients, temperature * (q - p), rtol=1e-4, atol=1e-6)


def test_certain_teachers_have_finite_losses():
    certain = tf.constant([[1000.0, 0.0], [-1000.0, 1000.0]])
    losses = teacher().losses(tf.constant([[1.0, 0.0], [1.0, 0.0]]), certain)
    np.testing.assert_allclose(losses, -np.log(softmax([1.0, 0.0])), rtol=1e-6)


def without_state(num_classes, image_shape):
    """The same in training and in inference."""
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(4, 3, strides=2, activation="relu")(images)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_teacher_and_student_see_the_same_mixtures(accumulation_steps):
    config = SMALL.replace(mixup_alpha=0.5, cutmix_alpha=0.5, accumulation_steps=accumulation_steps)
    model = build_model(config, model=without_state)
    model.teacher = teacher(model)  # so that all differences are those of images
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (8, 16, 16, 3)).astype(np.uint8)
    batch = tf.constant(images), tf.range(8), tf.ones(8)
    gradients, sums = tf.function(model.gradients, autograph=False)(batch)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=1e-6)
    model.metric_sums.add(sums)
    assert abs(float(model.metric_sums.results()["loss"])) < 1e-6


def test_images_are_resized_for_a_teacher_of_others():
    inputs = keras.Input((8, 8, 3), dtype="uint8")
    outputs = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(inputs))
    larger = tf.cast(tf.repeat(tf.repeat(tf.range(64), 2), 3), tf.uint8)
    larger = tf.repeat(tf.reshape(larger, [1, 8, 16, 3]), 2, axis=1)
    expected = tf.cast(tf.repeat(tf.range(64), 3)[tf.newaxis], tf.float32)
    found = teacher(keras.Model(inputs, outputs)).logits(larger)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (1, 192)


def test_a_teacher_is_in_inference_mode_and_has_no_gradient():
    inputs = keras.Input((4, 4, 3), dtype="uint8")
    x = keras.layers.BatchNormalization()(keras.layers.Rescaling(1.0)(inputs))
    outputs = keras.layers.Dropout(0.9)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    before = [own.numpy() for own in model.variables]
    images = tf.cast(tf.random.stateless_uniform([2, 4, 4, 3], (0, 1)) * 255, tf.uint8)
    with tf.GradientTape() as tape:
        logits = teacher(model).logits(images)
    assert tape.gradient(logits, model.trainable_variables) == [None, None]
    np.testing.assert_allclose(logits, model(images, training=False))
    for own, value in zip(model.variables, before):
        np.testing.assert_array_equal(own, value)
