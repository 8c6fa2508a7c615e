"""BlurPool against sums written in NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import BlurPool

SHAPES = [(2, 6, 8, 3), (2, 5, 7, 3), (1, 1, 2, 1)]
WEIGHTS = (0.25, 0.5, 0.25)


def taps(height, width, strides):
    """Yields (output row, output column, input row, input column, weight) of all products."""
    for row in range(0, height, strides):
        for column in range(0, width, strides):
            for i, by_row in enumerate(WEIGHTS, start=row - 1):
                for j, by_column in enumerate(WEIGHTS, start=column - 1):
                    if 0 <= i < height and 0 <= j < width:  # elsewhere are zeros
                        yield row // strides, column // strides, i, j, by_row * by_column


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strides", [1, 2])
def test_values_and_gradients(shape, strides):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype("float32")
    count, height, width, channels = shape
    blurred = np.zeros([count, -(-height // strides), -(-width // strides), channels])
    weights = rng.normal(size=blurred.shape).astype("float32")
    gradient = np.zeros(shape)
    for row, column, i, j, weight in taps(height, width, strides):
        blurred[:, row, column] += weight * x[:, i, j]
        gradient[:, i, j] += weight * weights[:, row, column]
    layer = BlurPool(strides)
    inputs = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs)
        loss = tf.reduce_sum(outputs * weights)
    np.testing.assert_allclose(outputs, blurred, rtol=0, atol=1e-6)
    np.testing.assert_allclose(tape.gradient(loss, inputs), gradient, rtol=0, atol=1e-6)
    assert layer.weights == []


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    x = np.random.default_rng(0).integers(0, 16, (1, 6, 6, 2)).astype("float32")
    outputs = BlurPool(dtype=policy)(x)
    assert outputs.dtype == policy.removeprefix("mixed_")
    # Sums of sixteenths below 16 have eight bits.
    np.testing.assert_array_equal(tf.cast(outputs, tf.float32), BlurPool()(x))


def test_saving(tmp_path):
    images = keras.Input((None, None, 3))
    model = keras.Model(images, BlurPool(2, name="blur")(images))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert again.get_layer("blur").strides == 2
    x = np.random.default_rng(0).normal(size=(2, 5, 7, 3)).astype("float32")
    np.testing.assert_array_equal(again(x), model(x))


def test_no_strides():
    with pytest.raises(UserError, match="strides is 0, but must be positive"):
        BlurPool(0)
