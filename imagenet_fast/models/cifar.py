"""What the networks of the CIFAR-10 records have in common (Page 2019, Jordan 2024).

Convolutions and the last layer have no biases, and their weights begin as PyTorch's, with which
the records were set: U(-b, b) with b = 1 / sqrt(fan-in).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError

# PyTorch's U(-b, b), in the terms of Keras' initialiser.
PYTORCH_WEIGHTS = {"scale": 1 / 3, "mode": "fan_in", "distribution": "uniform"}


def check_image_and_width(
    model: str, input_shape: tuple[int | None, int | None, int], least: int, width: int
) -> None:
    """Checks that a network leaves something of its images, and has channels to do so.

    Args:
        model: its name.
        input_shape: (height, width, channels) of one image; None is an unknown height or width.
        least: height and width of the smallest image that passes its pools.
        width: channels of its first convolutions; 0: as published.

    Raises:
        UserError: if it does not.
    """
    height, breadth, _ = input_shape
    if any(size is not None and size < least for size in (height, breadth)):
        raise UserError(
            f"{model}: images of {height} x {breadth} pixels cannot pass its three pools; use at "
            f"least {least} x {least}"
        )
    if width < 0:
        raise UserError(f"{model}: width={width} is negative; use 0 for the published width")


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
    """Applies a convolution of stride 1 and what goes with it.

    Args:
        x: float [batch, height, width, channels].
        filters: of the convolution.
        steps: what to apply, in this order, each of which ends the name of its layer: ``conv``,
            ``bn``, ``pool`` (maximum of 2x2), and any other word for the activation; as
            ``"conv_pool_bn_relu"``.
        name: how the names of the layers begin.
        norm: makes the batch norm, from its name.
        activation: makes the activation, from its name.
        kernel_size: of the convolution, which is padded to keep the size of the image.
        kernel_initializer: of the convolution; None: PyTorch's.

    Returns:
        Float [batch, height, width, filters]; with a pool, half the height and the width.
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
    """Returns float32 [batch, num_classes]: a dense layer of the channels' maxima, times a scale.

    Args:
        x: float [batch, height, width, channels].
        num_classes: number of logits.
        scale: what the dense layer's outputs are multiplied by.
    """
    x = keras.layers.GlobalMaxPooling2D(name="global_pool")(x)
    x = keras.layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(**PYTORCH_WEIGHTS),
        # Losses and probabilities of 16-bit logits would be too coarse.
        dtype="float32",
        name="logits",
    )(x)
    return keras.layers.Rescaling(scale, dtype="float32", name="scale")(x)
