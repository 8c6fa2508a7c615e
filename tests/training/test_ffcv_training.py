"""Training steps of ffcv-imagenet's recipes, against a plain loop after train_imagenet.py.

The network is torchvision's ResNet-18, shortened to a block in each of two stages, the second with
strides of 2. Only its gradients are TensorFlow's.
"""

import re

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, build_model
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models import network_of

STEPS, BATCH, CLASSES = 6, 8, 10
WARMUP, LENGTH = 3, 20_000  # steps
PEAK, DECAY, SMOOTHING, MOMENTUM = 0.05, 5e-5, 0.1, 0.9
MEAN, STD = np.array([0.485, 0.456, 0.406]) * 255, np.array([0.229, 0.224, 0.225]) * 255


def convolve(x, kernel, stride=1, blur=False):
    """As BlurPoolConv2d with ``blur``: both convolutions padded with zeros on all sides."""
    if blur:
        for shape in ((3, 1, 1, 1), (1, 3, 1, 1)):
            taps = tf.reshape([0.25, 0.5, 0.25], shape)
            x = tf.nn.depthwise_conv2d(x, tf.tile(taps, [1, 1, x.shape[-1], 1]), [1] * 4, "SAME")
    pad = [kernel.shape[0] // 2] * 2
    return tf.nn.conv2d(tf.pad(x, [[0, 0], pad, pad, [0, 0]]), kernel, stride, "VALID")


def normalize(x, weights, name):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    own = (weights[f"{name}/{role}"] for role in ("beta", "gamma"))
    return tf.nn.batch_normalization(x, mean, variance, *own, 1e-5)


def forward(weights, images):
    """Returns logits as in training."""

    def conv_norm(x, conv, norm, stride=1, blur=False):
        return normalize(convolve(x, weights[f"{conv}/kernel"], stride, blur), weights, norm)

    x = tf.constant((images - MEAN) / STD, tf.float32)
    x = tf.nn.relu(conv_norm(x, "stem_conv", "stem_bn", 2))
    x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
    for name, stride in (("stage1_block1", 1), ("stage2_block1", 2)):
        blur = stride == 2
        y = conv_norm(x, f"{name}_conv1", f"{name}_bn1", stride, blur)
        y = conv_norm(tf.nn.relu(y), f"{name}_conv2", f"{name}_bn2")
        if blur:
            projection = f"{name}_projection"
            x = conv_norm(x, f"{projection}_conv", f"{projection}_bn", stride, blur)
        x = tf.nn.relu(x + y)
    return tf.reduce_mean(x, [1, 2]) @ weights["logits/kernel"] + weights["logits/bias"]


def trained(weights, images, labels):
    """Returns the losses, and the weights after training."""
    weights = {name: tf.constant(value) for name, value in weights.items()}
    targets = np.eye(CLASSES)[labels] * (1 - SMOOTHING) + SMOOTHING / CLASSES
    buffers = dict.fromkeys(weights, 0.0)
    losses = []
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            chances = tf.nn.log_softmax(forward(weights, images[batch]))
            loss = -tf.reduce_mean(tf.reduce_sum(targets[batch] * chances, axis=1))
        losses.append(float(loss))
        rate = np.interp(step, [0, WARMUP, LENGTH], [1e-4 * PEAK, PEAK, 0])
        for name, gradient in tape.gradient(loss, weights).items():
            if not re.search(r"bn\d?/", name):
                gradient += DECAY * weights[name]
            buffers[name] = MOMENTUM * buffers[name] + gradient
            weights[name] = weights[name] - rate * buffers[name]
    return losses, weights


def test_steps_are_those_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr("imagenet_fast.models.resnet._BASIC", {18: (1, 1)})
    config = Config.from_flagfile(
        "ffcv_rn18_16",
        synthetic=True,
        num_classes=CLASSES,
        image_size=32,
        size_ramp=(),
        eval_image_size=0,
        precision="float32",
        strategy="one_device",
        batch_size=BATCH,
        learning_rate=PEAK,
        learning_rate_batch=BATCH,
        warmup_start=1e-4 * PEAK,
        warmup=f"{WARMUP} steps",
        duration=f"{LENGTH} steps",
    )
    model = build_model(config)
    network = network_of(model)
    initial = {name_of(variable): variable.numpy() for variable in network.trainable_variables}
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (STEPS * BATCH, 32, 32, 3), np.uint8)
    labels = rng.integers(0, CLASSES, STEPS * BATCH)
    losses = [
        model.train_on_batch(images[place : place + BATCH], labels[place : place + BATCH])[0]
        for place in range(0, STEPS * BATCH, BATCH)
    ]
    expected_losses, expected = trained(initial, images, labels)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-2)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for variable in network.trainable_variables:
        value, before = expected[name_of(variable)].numpy(), initial[name_of(variable)]
        change = np.abs(value - before).max()
        assert change > 1e-4
        np.testing.assert_allclose(variable, value, rtol=0, atol=2e-3 * change)
