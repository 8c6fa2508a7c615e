"""Binary cross-entropy against NumPy: values, gradients, training and predictions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import assert_close, weights_of
from small_config import SMALL

from imagenet_fast import Config, build_model, models
from imagenet_fast.base.errors import UserError
from imagenet_fast.models import network_of
from imagenet_fast.serving.module import serving_module
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.error_analysis import _rows, _worst_of_batch
from imagenet_fast.training.step.losses import Focus, class_probabilities, image_losses

BINARY = "binary_cross_entropy"
CLASSES = 7
LABELS = np.array([0, 3, 6, 2, 5, 5, 1, 4])
PARTNERS = LABELS[::-1].copy()
FRACTIONS = np.linspace(0, 1, 8, dtype="float32")


def sigmoid(z):
    return 1 / (1 + np.exp(-z.astype("float64")))


def targets(labels, smoothing, classes=CLASSES):
    return (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes


def reference(logits, targets):
    """-y log(p) - (1 - y) log(1 - p), summed over the classes."""
    logits = logits.astype("float64")
    return (targets * np.logaddexp(0, -logits) + (1 - targets) * np.logaddexp(0, logits)).sum(
        axis=1
    )


# Of 50, the sigmoids are 0 and 1 in float32, and their logarithms would be infinite.
@pytest.mark.parametrize("scale", [1, 50])
@pytest.mark.parametrize("smoothing", [0.0, 0.08])
@pytest.mark.parametrize("mixed", [False, True])
def test_against_numpy(scale, smoothing, mixed):
    logits = scale * np.random.default_rng(0).normal(size=(8, CLASSES)).astype("float32")
    own, partners = targets(LABELS, smoothing), targets(PARTNERS, smoothing)
    both = (PARTNERS, FRACTIONS) if mixed else ()
    if mixed:
        own = FRACTIONS[:, None] * own + (1 - FRACTIONS[:, None]) * partners
    variable = tf.Variable(logits)
    with tf.GradientTape() as tape:
        losses = image_losses(variable, LABELS, *both, loss=BINARY, label_smoothing=smoothing)
    np.testing.assert_allclose(losses, reference(logits, own), rtol=2e-6)
    gradient = tape.gradient(losses, variable)
    np.testing.assert_allclose(gradient, sigmoid(logits) - own, rtol=1e-5, atol=1e-6)


def test_small_losses_keep_their_digits():
    logits = np.where(np.eye(CLASSES)[LABELS], 20, -20).astype("float32")
    losses = image_losses(logits, LABELS, loss=BINARY)
    np.testing.assert_allclose(losses, CLASSES * np.log1p(np.exp(-20.0)), rtol=1e-5)


def test_half_precision_and_padding():
    """Computed in float32; padding, of label -1, counts as class 0."""
    logits = tf.constant(np.linspace(-8, 8, CLASSES)[None], tf.float16)
    (loss,) = image_losses(logits, np.array([-1]), loss=BINARY)
    assert loss.dtype == tf.float32
    expected = reference(logits.numpy(), targets([0], 0))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)


# --- Training


IMAGES = np.random.default_rng(1).normal(size=(8, 5)).astype("float32")
WEIGHTS = np.array([1, 1, 0, 1, 1, 1, 0, 1], "float32")


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_against_numpy(parts):
    """The loss is the weighted sum of the images' over the batch, however it is split."""
    keras.utils.set_random_seed(1)
    images = keras.Input((5,))
    outputs = keras.layers.Dense(CLASSES)(images)
    model = Classifier(images, outputs, loss=BINARY, label_smoothing=0.1, accumulation_steps=parts)
    model.compile(keras.optimizers.SGD(0.5))
    kernel, bias = (weight.copy() for weight in weights_of(model))
    logits = IMAGES @ kernel + bias
    expected = reference(logits, targets(LABELS, 0.1))[WEIGHTS == 1].mean()

    told = model.test_on_batch(IMAGES, LABELS, WEIGHTS, return_dict=True)
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    told = model.train_on_batch(IMAGES, LABELS, WEIGHTS, return_dict=True)
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    right = logits.argmax(1) == LABELS
    assert told["top1"] == pytest.approx(right[WEIGHTS == 1].mean())
    error = (sigmoid(logits) - targets(LABELS, 0.1)) * WEIGHTS[:, None] / 8
    assert_close(weights_of(model), [kernel - 0.5 * IMAGES.T @ error, bias - 0.5 * error.sum(0)])


@pytest.fixture(scope="module")
def model():
    return build_model(SMALL.replace(loss=BINARY, decoupled_weight_decay=True, learning_rate=0.25))


def test_a_new_network_gives_each_class_the_same_probability(model):
    """-log(classes) as the bias: sigmoids of 1 / 11 for 10 classes, before any feature counts."""
    head = models.head(network_of(model))
    np.testing.assert_allclose(head.bias, [-np.log(10)] * 10, rtol=1e-6)
    np.testing.assert_allclose(sigmoid(head.bias.numpy()), 1 / 11, rtol=1e-6)


def test_decay_is_relative_to_the_rate_after_the_warmup(model):
    assert model.optimizer.decoupled_at_rate == model.config.scaled_learning_rate


# --- Predictions


def test_probabilities():
    logits = np.random.default_rng(2).normal(size=(4, 3)).astype("float32")
    np.testing.assert_allclose(class_probabilities(logits, BINARY), sigmoid(logits), rtol=1e-6)
    softmax = class_probabilities(logits, "cross_entropy").numpy()
    np.testing.assert_allclose(softmax.sum(1), 1, rtol=1e-6)


def test_predictions_and_exports_are_sigmoids(model):
    pixels = np.random.default_rng(3).integers(0, 256, (2, *model.input_shape[1:]), np.uint8)
    expected = sigmoid(model(pixels, training=False).numpy())
    np.testing.assert_allclose(model.predict_on_batch(pixels), expected, rtol=1e-5)
    with serving_module(model) as module:
        exported = module.classify_pixels(tf.constant(pixels))["probabilities"]
    np.testing.assert_allclose(exported, expected, rtol=1e-5)


def test_the_worst_mistakes_have_the_highest_losses():
    # Sure of the wrong class; unsure of both; right.
    logits = np.array([[4, -4, -4], [-1, -1, 1], [-9, 9, -9]], "float32")
    labels = np.array([1, 0, 1], np.int32)
    pixels = np.zeros((3, 1, 1, 3), np.uint8)
    rows = _rows(labels, np.ones(3, "float32"), logits, BINARY, top=1)
    *_, facts = _worst_of_batch(pixels, rows, tf.constant(0, tf.int64), logits, BINARY)
    losses = reference(logits, targets(labels, 0, 3))
    probabilities = sigmoid(logits)
    for row, image in zip(facts.numpy(), (0, 1)):
        own = probabilities[image, labels[image]]
        np.testing.assert_allclose(
            row[3:], [own, probabilities[image].max(), losses[image]], rtol=1e-5
        )
    assert facts[2, -1] == -np.inf


# --- Several labels, focal and asymmetric losses


HOT = np.random.default_rng(3).integers(0, 2, (8, CLASSES))
LOGITS = np.random.default_rng(4).normal(size=(8, CLASSES)).astype("float32") * 3


def test_multi_hot_labels_against_keras():
    """Keras takes the mean over the classes."""
    keras_loss = keras.losses.BinaryCrossentropy(
        from_logits=True, label_smoothing=0.1, reduction="none"
    )
    losses = image_losses(LOGITS, HOT, loss=BINARY, label_smoothing=0.1)
    np.testing.assert_allclose(losses, CLASSES * keras_loss(HOT, LOGITS), rtol=1e-5)


@pytest.mark.parametrize("labels", [HOT, LABELS])
def test_focal_loss_against_keras(labels):
    hot = labels if labels.ndim == 2 else np.eye(CLASSES)[labels]
    keras_loss = keras.losses.BinaryFocalCrossentropy(
        apply_class_balancing=True, alpha=0.3, gamma=1.5, from_logits=True, reduction="none"
    )
    focus = Focus.of(Config(loss="focal", focal_gamma=1.5, focal_alpha=0.3))
    losses = image_losses(LOGITS, labels, loss="focal", focus=focus)
    np.testing.assert_allclose(losses, CLASSES * keras_loss(hot, LOGITS), rtol=1e-5)


def test_asymmetric_loss_against_its_formula():
    """Equations 4 to 7 of Ridnik et al. 2021."""
    p = sigmoid(LOGITS)
    shifted = np.maximum(p - 0.05, 0)
    positive = (1 - p) ** 1.0 * np.log(p)
    negative = shifted**4.0 * np.log(1 - shifted)
    expected = -(HOT * positive + (1 - HOT) * negative).sum(1)
    focus = Focus.of(Config(loss="asymmetric", positive_gamma=1.0))
    np.testing.assert_allclose(
        image_losses(LOGITS, HOT, loss="asymmetric", focus=focus), expected, rtol=1e-5
    )


@pytest.mark.parametrize("loss", ["focal", "asymmetric"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_gradients_are_finite_where_probabilities_are_0_or_1(loss, gamma):
    names = ("focal_gamma",) if loss == "focal" else ("positive_gamma", "negative_gamma")
    focus = Focus.of(Config(loss=loss, **dict.fromkeys(names, gamma)))
    logits = tf.Variable([[-1000.0, 1000.0, -20.0, 20.0, -2.9444, 0.0, 88.0]])
    with tf.GradientTape() as tape:
        losses = image_losses(logits, HOT[:1], loss=loss, focus=focus)
    assert np.isfinite(losses).all() and np.isfinite(tape.gradient(losses, logits)).all()


def test_focus_of_zero_is_binary_cross_entropy():
    focus = Focus.of(Config(loss="asymmetric", negative_gamma=0.0, probability_margin=0.0))
    losses = image_losses(LOGITS, HOT, loss="asymmetric", focus=focus)
    np.testing.assert_allclose(losses, image_losses(LOGITS, HOT, loss=BINARY), rtol=1e-6)


@pytest.mark.parametrize("loss", [BINARY, "focal", "asymmetric"])
def test_the_loss_of_mixed_labels_is_that_of_the_mixed_target(loss):
    """Of convex combinations of multi-hot labels, smoothed, with weights of classes."""
    focus, weights = Focus.of(Config(loss=loss)), np.linspace(0.5, 2, CLASSES)
    partners = HOT[::-1].copy()
    losses = image_losses(
        LOGITS,
        HOT,
        partners,
        FRACTIONS,
        loss=loss,
        focus=focus,
        label_smoothing=0.1,
        class_weights=weights,
    )
    target = FRACTIONS[:, None] * HOT + (1 - FRACTIONS[:, None]) * partners
    target = 0.9 * target + 0.05
    p = sigmoid(LOGITS)
    q = np.maximum(p - focus.margin, 0)
    positive = focus.positive_weight * (1 - p) ** focus.positive_gamma * np.log(p) * weights
    negative = focus.negative_weight * q**focus.negative_gamma * np.log(1 - q)
    expected = -(target * positive + (1 - target) * negative).sum(1)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_padding_of_several_labels_counts_as_no_class():
    losses = image_losses(LOGITS[:1], -np.ones([1, CLASSES], "int32"), loss=BINARY)
    np.testing.assert_allclose(losses, reference(LOGITS[:1], np.zeros([1, CLASSES])), rtol=1e-5)


def test_cross_entropy_of_several_labels_is_refused():
    with pytest.raises(UserError, match="give --loss=binary_cross_entropy, focal or asymmetric"):
        image_losses(LOGITS, HOT)


def test_fit_takes_multi_hot_labels():
    """And top-1 is whether the best class is one of the image's."""
    model = build_model(SMALL.replace(loss=BINARY))
    random = np.random.default_rng(0)
    size, classes = SMALL.image_size, model.output_shape[-1]
    images = random.integers(0, 255, (8, size, size, 3)).astype("uint8")
    labels = random.integers(0, 2, (8, classes))
    model.fit(images, labels, batch_size=4, epochs=1, steps_per_epoch=2, verbose=0)
    best = model.predict(images, verbose=0).argmax(1)
    metrics = model.evaluate(images, labels, verbose=0, return_dict=True)
    assert metrics["top1"] == pytest.approx(labels[np.arange(8), best].mean())
    assert metrics["examples"] == 8
