"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015).

``resnet`` is the family for ImageNet and ``cifar_resnet`` that for CIFAR-10. Their blocks,
ReLU(shortcut + conv-BN-ReLU-...-conv-BN), differ in the convolutions, and in the shortcut where the
shape changes.

Convolutions have no bias. By default they are padded equally on all sides, as in most of the
published code: Keras' ``padding="same"`` would pad a stride-2 convolution of an even-sized image
only at the bottom and right. Their initial weights are by default N(0, 2 / (k * k * filters)), He
et al.'s rule with fan-out and without truncation, as in fb.resnet.torch, on which Goyal et al. 2017
build; the classifier's are N(0, 0.01^2), also theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import BlurPool
from imagenet_fast.models.arguments import check_sizes, check_width
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments
from imagenet_fast.models.options import check_choices

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

IMAGENET_DEPTHS = (*_BASIC, *_BOTTLENECK)
CIFAR_DEPTHS = (8, 14, 20, 32, 56)
_PUBLISHED_WIDTH = 64
# Arguments of VarianceScaling by conv_init.
_CONV_INIT: dict[str, dict[str, Any]] = {
    "he_fan_out": {"scale": 2.0, "mode": "fan_out", "distribution": "untruncated_normal"},
    "he_fan_in": {"scale": 2.0, "mode": "fan_in", "distribution": "untruncated_normal"},
    "he_normal": {"scale": 2.0, "mode": "fan_in", "distribution": "truncated_normal"},
    "lecun_normal": {"scale": 1.0, "mode": "fan_in", "distribution": "truncated_normal"},
}


def resnet(
    depth: int,
    num_classes: int = 1000,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    *,
    width: int = 0,
    stem: str = "imagenet",
    zero_gamma: bool = True,
    stride_on_1x1: bool = False,
    blur_pool: str = "none",
    padding: str = "symmetric",
    conv_init: str = "he_fan_out",
    gamma_init: str = "ones",
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes a ResNet for ImageNet: basic blocks at depths 18 and 34, bottlenecks above.

    The options of the same names say what the arguments' values mean.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; height and width may be None.
        width: channels of the first convolution, to which all others are in proportion; 0: 64, as
            published.
        stem: ``"imagenet"``, or ``"small"`` for images of about 32 pixels.
        zero_gamma: whether the last batch norm of each block starts with gamma 0 instead of 1, so
            the block starts as the identity (Goyal et al. 2017, section 5.1).
        stride_on_1x1: whether a bottleneck's stride is in its first 1x1 convolution, as in He et
            al. and Keras applications ("v1"), not in the 3x3, as in Goyal et al. ("v1.5").
        blur_pool: where a :class:`~imagenet_fast.layers.BlurPool` precedes the subsampling:
            ``"convolutions"``, projections included, is ffcv-imagenet's,
            ``"convolutions_and_pools"`` composer's.
        padding: ``"same"`` is that of MLPerf's TF2 reference, ``"same_pool"`` of Google's code for
            TPUs.
        conv_init: ``"he_fan_out"`` is that of fb.resnet.torch and torchvision, ``"he_fan_in"`` of
            MXNet and composer, ``"he_normal"`` of MLPerf's TF2 reference, ``"lecun_normal"`` of
            Google's code for TPUs.
        gamma_init: of other batch norms; ``"uniform"`` is composer's.
        name: the model's name; None: ``resnet<depth>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Raises:
        UserError: if there is no such depth, stem, ``blur_pool``, ``padding``, ``conv_init`` or
            ``gamma_init``, the depth has no 1x1 for the stride, or the width is negative.
    """
    check_sizes(f"resnet{depth}", num_classes, input_shape)
    check_width(f"resnet{depth}", width)
    if depth not in IMAGENET_DEPTHS:
        raise UserError(f"resnet: there is no depth {depth}; the depths are {IMAGENET_DEPTHS}")
    check_choices(
        "resnet",
        stem=stem,
        blur_pool=blur_pool,
        padding=padding,
        conv_init=conv_init,
        gamma_init=gamma_init,
    )
    if stride_on_1x1 and depth in _BASIC:
        raise UserError(
            f"resnet: stride_on_1x1 needs blocks with 1x1 convolutions, which depth {depth} "
            f"does not have; the depths that do are {tuple(_BOTTLENECK)}"
        )
    norm = _norm(gamma_init, norm_options)
    stem_conv = functools.partial(_conv, init=conv_init)
    conv = functools.partial(
        stem_conv,
        padding="same" if padding == "same" else "symmetric",
        blur=blur_pool != "none",
    )
    first = width or _PUBLISHED_WIDTH

    images = keras.Input(input_shape, name="images")
    kernel_size, strides = (7, 2) if stem == "imagenet" else (3, 1)
    x = _stem(images, first, kernel_size, strides, stem_conv, norm)
    if stem == "imagenet":
        if padding == "symmetric":
            # Zeros are as good as -inf for the pool's padding: ReLU's outputs are not below them.
            x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        pool_padding = "valid" if padding == "symmetric" else "same"
        blurs = blur_pool == "convolutions_and_pools"
        x = keras.layers.MaxPooling2D(3, 1 if blurs else 2, pool_padding, name="stem_pool")(x)
        if blurs:
            x = BlurPool(2, name="stem_pool_blur")(x)

    for stage, blocks in enumerate({**_BASIC, **_BOTTLENECK}[depth], start=1):
        filters = first * 2 ** (stage - 1)
        for block in range(1, blocks + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            block_name = f"stage{stage}_block{block}"
            if depth in _BASIC:
                convs = [(filters, 3, strides), (filters, 3, 1)]
            elif stride_on_1x1:
                convs = [(filters, 1, strides), (filters, 3, 1), (4 * filters, 1, 1)]
            else:
                convs = [(filters, 1, 1), (filters, 3, strides), (4 * filters, 1, 1)]
            shortcut = x
            if strides > 1 or x.shape[-1] != convs[-1][0]:
                shortcut = conv(x, convs[-1][0], 1, strides, f"{block_name}_projection_conv")
                shortcut = norm(name=f"{block_name}_projection_bn")(shortcut)
            x = _residual_block(x, shortcut, convs, conv, norm, zero_gamma, block_name)
    return keras.Model(images, _logits(x, num_classes), name=name or f"resnet{depth}")


def cifar_resnet(
    depth: int,
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    zero_gamma: bool = True,
    conv_init: str = "he_fan_out",
    gamma_init: str = "ones",
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes a ResNet for CIFAR-10 (He et al. 2015, section 4.2).

    A 3x3 convolution, then three stages of (depth - 2) / 6 basic blocks with 16, 32 and 64
    channels. Shortcuts have no parameters, the paper's option A.

    Args:
        depth: 8, 14, 20, 32 or 56.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; height and width may be None.
        zero_gamma: start the last batch norm of each block with gamma 0.
        conv_init: as in :func:`resnet`.
        gamma_init: likewise.
        name: the model's name; None: ``resnet<depth>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Returns:
        An uncompiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such depth, ``conv_init`` or ``gamma_init``.
    """
    check_sizes(f"resnet{depth}", num_classes, input_shape)
    if depth not in CIFAR_DEPTHS:
        raise UserError(f"cifar_resnet: there is no depth {depth}; the depths are {CIFAR_DEPTHS}")
    check_choices("cifar_resnet", conv_init=conv_init, gamma_init=gamma_init)
    norm = _norm(gamma_init, norm_options)
    conv = functools.partial(_conv, init=conv_init)

    images = keras.Input(input_shape, name="images")
    x = _stem(images, 16, 3, 1, conv, norm)
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(1, (depth - 2) // 6 + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            block_name = f"stage{stage}_block{block}"
            shortcut = x
            if strides > 1:
                shortcut = SubsampleAndPad(strides, width, name=f"{block_name}_shortcut")(x)
            convs = [(width, 3, strides), (width, 3, 1)]
            x = _residual_block(x, shortcut, convs, conv, norm, zero_gamma, block_name)
    return keras.Model(images, _logits(x, num_classes), name=name or f"resnet{depth}")


@keras.saving.register_keras_serializable(package="imagenet_fast")
class SubsampleAndPad(keras.layers.Layer):
    """The parameter-free shortcut where the shape changes, He et al.'s option A.

    Subsamples the image and appends channels of zeros: [batch, height, width, channels] becomes
    [batch, ceil(height / strides), ceil(width / strides), filters].

    Args:
        strides: of the subsampling, in both directions.
        filters: number of output channels, at least that of the inputs.
        **kwargs: Keras' options (``name``, ``dtype``).
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


def _norm(gamma_init: str, norm_options: NormOptions) -> Callable[..., keras.layers.Layer]:
    """Returns what makes batch norms with an initial gamma, which a call may override."""
    make = batch_norm(**norm_arguments(**norm_options))
    if gamma_init == "ones":
        return make

    def uniform(**options: Any) -> keras.layers.Layer:
        # A new one each time: Keras' initializers return the same values in each call.
        gamma = keras.initializers.RandomUniform(0.0, 1.0)
        return make(**{"gamma_initializer": gamma, **options})

    return uniform


def _conv(
    x: tf.Tensor,
    filters: int,
    kernel_size: int,
    strides: int,
    name: str,
    *,
    init: str,
    padding: str = "symmetric",
    blur: bool = False,
) -> tf.Tensor:
    """A convolution, padded to keep the image's size before the stride.

    With symmetric padding there are ``kernel_size // 2`` zeros on every side of the image. Of
    stride 2, it follows a blur if ``blur`` is set.
    """
    if blur and strides > 1:
        # A convolution of 1x1 would read only every second pixel: the others are not computed.
        subsampling = strides if kernel_size == 1 else 1
        x = BlurPool(subsampling, name=f"{name}_blur")(x)
        strides //= subsampling
    if strides > 1 and padding == "symmetric":
        padding = "valid"
        if kernel_size > 1:
            x = keras.layers.ZeroPadding2D(kernel_size // 2, name=f"{name}_pad")(x)
    return keras.layers.Conv2D(
        filters,
        kernel_size,
        strides,
        "valid" if padding == "valid" else "same",
        use_bias=False,
        # A new one each time: Keras' initializers return the same values in each call.
        kernel_initializer=keras.initializers.VarianceScaling(**_CONV_INIT[init]),
        name=name,
    )(x)


def _stem(
    images: tf.Tensor,
    filters: int,
    kernel_size: int,
    strides: int,
    conv: Callable[..., tf.Tensor],
    norm: Callable[..., keras.layers.Layer],
) -> tf.Tensor:
    x = conv(images, filters, kernel_size, strides, "stem_conv")
    x = norm(name="stem_bn")(x)
    return keras.layers.Activation("relu", name="stem_relu")(x)


def _residual_block(
    x: tf.Tensor,
    shortcut: tf.Tensor,
    convs: Sequence[tuple[int, int, int]],
    conv: Callable[..., tf.Tensor],
    norm: Callable[..., keras.layers.Layer],
    zero_gamma: bool,
    name: str,
) -> tf.Tensor:
    """Adds ``convs``, each (filters, kernel size, strides), applied to ``x``, to ``shortcut``."""
    for i, (filters, kernel_size, strides) in enumerate(convs, start=1):
        last = i == len(convs)
        x = conv(x, filters, kernel_size, strides, f"{name}_conv{i}")
        gamma = {"gamma_initializer": "zeros"} if last and zero_gamma else {}
        x = norm(**gamma, name=f"{name}_bn{i}")(x)
        if not last:
            x = keras.layers.Activation("relu", name=f"{name}_relu{i}")(x)
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.Activation("relu", name=f"{name}_relu")(x)


def _logits(x: tf.Tensor, num_classes: int) -> tf.Tensor:
    x = keras.layers.GlobalAveragePooling2D(name="global_pool")(x)
    return keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        # 16-bit logits would make losses and probabilities too coarse.
        dtype="float32",
        name="logits",
    )(x)
