"""Blocks of the networks of the CIFAR-10 records (Page 2019, Jordan 2024).

Convolutions and the last layer have no biases, and PyTorch's initial weights, as in the records:
U(-b, b) with b = 1 / sqrt(fan-in).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

# As arguments of keras.initializers.VarianceScaling.
PYTORCH_WEIGHTS = {"scale": 1 / 3, "mode": "fan_in", "distribution": "uniform"}


def conv_block(
    x: tf.Tensor,
    filters: int,
    steps: str,
    name: str,
    *,
    norm: Callable[..., keras.layers.Layer],
    activation: Callable[..., keras.layers.Layer],
    kernel_size: int = 3,
    kernel_initializer: keras.initializers.Initializer | None = None,
) -> tf.Tensor:
    """Applies a convolution of stride 1, with batch norm, pooling and activation in any order.

    Args:
        x: float [batch, height, width, channels].
        filters: of the convolution.
        steps: layers in order, as ``"conv_pool_bn_relu"``: ``conv``, ``bn``, ``pool`` (2x2 max
            pool), and any other word for the activation. Each word is the suffix of its layer's
            name.
        name: prefix of the layers' names.
        norm: makes the batch norm, from its name.
        activation: makes the activation, from its name.
        kernel_size: of the convolution, whose padding keeps the size of the image.
        kernel_initializer: of the convolution; None: PyTorch's.

    Returns:
        Float [batch, height, width, filters]; with a pool, half the height and width.
    """
    if kernel_initializer is None:
        kernel_initializer = keras.initializers.VarianceScaling(**PYTORCH_WEIGHTS)
    layers: dict[str, Callable[..., keras.layers.Layer]] = {
        "conv": functools.partial(
            keras.layers.Conv2D,
            filters,
            kernel_size,
            padding="same",
            use_bias=False,
            kernel_initializer=kernel_initializer,
        ),
        "bn": norm,
        "pool": functools.partial(keras.layers.MaxPooling2D, 2),
    }
    for step in steps.split("_"):
        x = layers.get(step, activation)(name=f"{name}_{step}")(x)
    return x


def max_pool_logits(x: tf.Tensor, num_classes: int, scale: float) -> tf.Tensor:
    """Returns scaled float32 logits [batch, num_classes] of a global max pool of 4D inputs."""
    x = keras.layers.GlobalMaxPooling2D(name="global_pool")(x)
    x = keras.layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(**PYTORCH_WEIGHTS),
        # 16-bit logits would make losses and probabilities too coarse.
        dtype="float32",
        name="logits",
    )(x)
    return keras.layers.Rescaling(scale, dtype="float32", name="scale")(x)
