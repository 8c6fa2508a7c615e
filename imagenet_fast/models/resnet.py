"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015).

``resnet`` is the family for ImageNet and ``cifar_resnet`` the one for CIFAR-10. Both are made of
one block, ReLU(shortcut + conv-BN-ReLU-...-conv-BN), and differ in the convolutions inside it and
in the shortcut where the shape changes.

Convolutions have no bias and are padded alike on all sides, as in the published code: Keras'
``padding="same"`` would pad a stride-2 convolution of an even-sized image on the bottom and right
only. Their weights are N(0, 2 / (k * k * filters)), He et al.'s rule with the fan-out and without
truncation, as in fb.resnet.torch, the code that Goyal et al. 2017 start from; the classifier's are
N(0, 0.01^2), also theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.models.arguments import check_sizes
from imagenet_fast.models.batch_norm import batch_norm

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

IMAGENET_DEPTHS = (*_BASIC, *_BOTTLENECK)
CIFAR_DEPTHS = (8, 14, 20, 32, 56)


def resnet(
    depth: int,
    num_classes: int = 1000,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    *,
    stem: str = "imagenet",
    zero_gamma: bool = True,
    stride_on_1x1: bool = False,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    batch_norm_group_size: int = 1,
    ghost_batch_size: int = 0,
    name: str | None = None,
) -> keras.Model:
    """Makes a ResNet for ImageNet: basic blocks at depths 18 and 34, bottlenecks above.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; height and width may be None.
        stem: ``"imagenet"``, a 7x7 convolution and a 3x3 max pool, both of stride 2, or
            ``"small"``, a 3x3 convolution of stride 1 and no pool, for images of about 32 pixels.
        zero_gamma: start the last batch norm of each block with gamma 0, so that the block is
            the identity at first (Goyal et al. 2017, section 5.1); otherwise gamma is 1.
        stride_on_1x1: put the stride of a bottleneck on its first 1x1 convolution, as He et al.
            and Keras applications do ("v1"), and not on the 3x3, as Goyal et al. do ("v1.5").
        batch_norm_momentum: fraction of the old value in each update of the moving averages.
        batch_norm_epsilon: added to the variance.
        batch_norm_group_size: neighbouring replicas that take the statistics together.
        ghost_batch_size: images of a replica that take the statistics together; 0: all.
        name: the model's name; None makes it ``resnet<depth>``.

    Returns:
        An un-compiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such depth or stem, or the depth has no 1x1 for the stride.
    """
    check_sizes(num_classes, input_shape)
    if depth not in IMAGENET_DEPTHS:
        raise UserError(f"resnet: there is no depth {depth}; the depths are {IMAGENET_DEPTHS}")
    if stem not in ("imagenet", "small"):
        raise UserError(f"resnet: there is no stem {stem!r}; the stems are 'imagenet' and 'small'")
    if stride_on_1x1 and depth in _BASIC:
        raise UserError(
            f"resnet: stride_on_1x1 needs blocks with 1x1 convolutions, which depth {depth} "
            f"does not have; the depths that do are {tuple(_BOTTLENECK)}"
        )
    norm = batch_norm(
        batch_norm_momentum,
        batch_norm_epsilon,
        batch_norm_group_size,
        ghost_batch_size=ghost_batch_size,
    )

    images = keras.Input(input_shape, name="images")
    if stem == "imagenet":
        x = _conv_norm_relu(images, 64, 7, 2, norm, "stem")
        # Zeros may stand in for the pool's padding: nothing that leaves a ReLU is below them.
        x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    else:
        x = _conv_norm_relu(images, 64, 3, 1, norm, "stem")

    for stage, blocks in enumerate({**_BASIC, **_BOTTLENECK}[depth], start=1):
        width = 64 * 2 ** (stage - 1)
        for block in range(1, blocks + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            block_name = f"stage{stage}_block{block}"
            if depth in _BASIC:
                convs = [(width, 3, strides), (width, 3, 1)]
            elif stride_on_1x1:
                convs = [(width, 1, strides), (width, 3, 1), (4 * width, 1, 1)]
            else:
                convs = [(width, 1, 1), (width, 3, strides), (4 * width, 1, 1)]
            shortcut = x
            if strides > 1 or x.shape[-1] != convs[-1][0]:
                shortcut = _conv(x, convs[-1][0], 1, strides, f"{block_name}_projection_conv")
                shortcut = norm(name=f"{block_name}_projection_bn")(shortcut)
            x = _residual_block(x, shortcut, convs, norm, zero_gamma, block_name)
    return keras.Model(images, _logits(x, num_classes), name=name or f"resnet{depth}")


def cifar_resnet(
    depth: int,
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    zero_gamma: bool = True,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    batch_norm_group_size: int = 1,
    ghost_batch_size: int = 0,
    name: str | None = None,
) -> keras.Model:
    """Makes a ResNet for CIFAR-10 (He et al. 2015, section 4.2).

    A 3x3 convolution, then three stages of (depth - 2) / 6 basic blocks with 16, 32 and 64
    channels. Shortcuts have no parameters, the paper's option A.

    Args:
        depth: 8, 14, 20, 32 or 56.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; height and width may be None.
        zero_gamma: start the last batch norm of each block with gamma 0; otherwise gamma is 1.
        batch_norm_momentum: fraction of the old value in each update of the moving averages.
        batch_norm_epsilon: added to the variance.
        batch_norm_group_size: neighbouring replicas that take the statistics together.
        ghost_batch_size: images of a replica that take the statistics together; 0: all.
        name: the model's name; None makes it ``resnet<depth>``.

    Returns:
        An un-compiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such depth.
    """
    check_sizes(num_classes, input_shape)
    if depth not in CIFAR_DEPTHS:
        raise UserError(f"cifar_resnet: there is no depth {depth}; the depths are {CIFAR_DEPTHS}")
    norm = batch_norm(
        batch_norm_momentum,
        batch_norm_epsilon,
        batch_norm_group_size,
        ghost_batch_size=ghost_batch_size,
    )

    images = keras.Input(input_shape, name="images")
    x = _conv_norm_relu(images, 16, 3, 1, norm, "stem")
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(1, (depth - 2) // 6 + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            block_name = f"stage{stage}_block{block}"
            shortcut = x
            if strides > 1:
                shortcut = SubsampleAndPad(strides, width, name=f"{block_name}_shortcut")(x)
            convs = [(width, 3, strides), (width, 3, 1)]
            x = _residual_block(x, shortcut, convs, norm, zero_gamma, block_name)
    return keras.Model(images, _logits(x, num_classes), name=name or f"resnet{depth}")


@keras.saving.register_keras_serializable(package="imagenet_fast")
class SubsampleAndPad(keras.layers.Layer):
    """The shortcut without parameters, He et al.'s option A, where the shape changes.

    Keeps every ``strides``-th pixel and appends channels of zeros: [batch, height, width,
    channels] becomes [batch, ceil(height / strides), ceil(width / strides), filters].

    Args:
        strides: distance between the pixels that are kept, in both directions.
        filters: number of channels to return, no fewer than come in.
        **kwargs: passed to ``keras.layers.Layer``.
    """

    def __init__(self, strides: int, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strides = strides
        self.filters = filters

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the subsampled and padded ``inputs``, in their dtype."""
        x = inputs[:, :: self.strides, :: self.strides, :]
        return tf.pad(x, [[0, 0], [0, 0], [0, 0], [0, self.filters - inputs.shape[-1]]])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "strides": self.strides, "filters": self.filters}


def _conv(x: tf.Tensor, filters: int, kernel_size: int, strides: int, name: str) -> tf.Tensor:
    """A convolution with ``kernel_size // 2`` zeros on every side of the image."""
    padding = "same"
    if strides > 1:
        padding = "valid"
        if kernel_size > 1:
            x = keras.layers.ZeroPadding2D(kernel_size // 2, name=f"{name}_pad")(x)
    return keras.layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding,
        use_bias=False,
        # A new one each time: Keras' initialisers repeat their values when used again.
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, mode="fan_out", distribution="untruncated_normal"
        ),
        name=name,
    )(x)


def _conv_norm_relu(
    x: tf.Tensor,
    filters: int,
    kernel_size: int,
    strides: int,
    norm: Callable[..., keras.layers.Layer],
    name: str,
) -> tf.Tensor:
    x = _conv(x, filters, kernel_size, strides, f"{name}_conv")
    x = norm(name=f"{name}_bn")(x)
    return keras.layers.Activation("relu", name=f"{name}_relu")(x)


def _residual_block(
    x: tf.Tensor,
    shortcut: tf.Tensor,
    convs: Sequence[tuple[int, int, int]],
    norm: Callable[..., keras.layers.Layer],
    zero_gamma: bool,
    name: str,
) -> tf.Tensor:
    """Adds ``convs``, each (filters, kernel size, strides), applied to ``x``, to ``shortcut``."""
    for i, (filters, kernel_size, strides) in enumerate(convs, start=1):
        last = i == len(convs)
        x = _conv(x, filters, kernel_size, strides, f"{name}_conv{i}")
        gamma = "zeros" if last and zero_gamma else "ones"
        x = norm(gamma_initializer=gamma, name=f"{name}_bn{i}")(x)
        if not last:
            x = keras.layers.Activation("relu", name=f"{name}_relu{i}")(x)
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.Activation("relu", name=f"{name}_relu")(x)


def _logits(x: tf.Tensor, num_classes: int) -> tf.Tensor:
    x = keras.layers.GlobalAveragePooling2D(name="global_pool")(x)
    return keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        # Losses and probabilities of 16-bit logits would be too coarse.
        dtype="float32",
        name="logits",
    )(x)
