"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015).

``resnet`` is the family for ImageNet and ``cifar_resnet`` that for CIFAR-10. Their blocks,
ReLU(shortcut + conv-BN-ReLU-...-conv-BN), differ in the convolutions, and in the shortcut where the
shape changes.

Convolutions have no bias and are padded equally on all sides, as in the published code: Keras'
``padding="same"`` would pad a stride-2 convolution of an even-sized image only at the bottom and
right. Their initial weights are N(0, 2 / (k * k * filters)), He et al.'s rule with fan-out and
without truncation, as in fb.resnet.torch, on which Goyal et al. 2017 build; the classifier's are
N(0, 0.01^2), also theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import BlurPool
from imagenet_fast.models.arguments import check_sizes, check_width
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

IMAGENET_DEPTHS = (*_BASIC, *_BOTTLENECK)
CIFAR_DEPTHS = (8, 14, 20, 32, 56)
_PUBLISHED_WIDTH = 64

# Values of arguments.
_CHOICES = {
    "stem": ("imagenet", "small"),
    "blur_pool": ("none", "convolutions", "convolutions_and_pools"),
    "gamma_init": ("ones", "uniform"),
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
    gamma_init: str = "ones",
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes a ResNet for ImageNet: basic blocks at depths 18 and 34, bottlenecks above.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; height and width may be None.
        width: channels of the first convolution, to which all others are in proportion; 0: 64, as
            published.
        stem: ``"imagenet"``, a 7x7 convolution and a 3x3 max pool, both of stride 2, or
            ``"small"``, a 3x3 convolution of stride 1 and no pool, for images of about 32 pixels.
        zero_gamma: whether the last batch norm of each block starts with gamma 0 instead of 1, so
            the block starts as the identity (Goyal et al. 2017, section 5.1).
        stride_on_1x1: whether a bottleneck's stride is in its first 1x1 convolution, as in He et
            al. and Keras applications ("v1"), not in the 3x3, as in Goyal et al. ("v1.5").
        blur_pool: where a :class:`~imagenet_fast.layers.BlurPool` precedes the subsampling:
            ``"none"``; ``"convolutions"``, before the blocks' convolutions of stride 2, projections
            included, as in ffcv-imagenet; or ``"convolutions_and_pools"``, in the stem's pool, too,
            as in composer. The first convolution, of the images, is never blurred.
        gamma_init: initial gamma of other batch norms: ``"ones"``, or ``"uniform"``, random in
            [0, 1), as in composer.
        name: the model's name; None: ``resnet<depth>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Returns:
        An uncompiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such depth, stem, ``blur_pool`` or ``gamma_init``, the depth has
            no 1x1 for the stride, or the width is negative.
    """
    check_sizes(f"resnet{depth}", num_classes, input_shape)
    check_width(f"resnet{depth}", width)
    if depth not in IMAGENET_DEPTHS:
        raise UserError(f"resnet: there is no depth {depth}; the depths are {IMAGENET_DEPTHS}")
    _check_choices("resnet", stem=stem, blur_pool=blur_pool, gamma_init=gamma_init)
    if stride_on_1x1 and depth in _BASIC:
        raise UserError(
            f"resnet: stride_on_1x1 needs blocks with 1x1 convolutions, which depth {depth} "
            f"does not have; the depths that do are {tuple(_BOTTLENECK)}"
        )
    norm = _norm(gamma_init, norm_options)
    first = width or _PUBLISHED_WIDTH

    images = keras.Input(input_shape, name="images")
    if stem == "imagenet":
        x = _conv_norm_relu(images, first, 7, 2, norm, "stem")
        # Zeros are as good as -inf for the pool's padding: ReLU's outputs are not below them.
        x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        if blur_pool == "convolutions_and_pools":
            x = keras.layers.MaxPooling2D(3, 1, name="stem_pool")(x)
            x = BlurPool(2, name="stem_pool_blur")(x)
        else:
            x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    else:
        x = _conv_norm_relu(images, first, 3, 1, norm, "stem")

    blur = blur_pool != "none"
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
                conv_name = f"{block_name}_projection_conv"
                shortcut = _conv(x, convs[-1][0], 1, strides, conv_name, blur)
                shortcut = norm(name=f"{block_name}_projection_bn")(shortcut)
            x = _residual_block(x, shortcut, convs, norm, zero_gamma, block_name, blur)
    return keras.Model(images, _logits(x, num_classes), name=name or f"resnet{depth}")


def cifar_resnet(
    depth: int,
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    zero_gamma: bool = True,
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
        gamma_init: as in :func:`resnet`.
        name: the model's name; None: ``resnet<depth>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Returns:
        An uncompiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such depth or ``gamma_init``.
    """
    check_sizes(f"resnet{depth}", num_classes, input_shape)
    if depth not in CIFAR_DEPTHS:
        raise UserError(f"cifar_resnet: there is no depth {depth}; the depths are {CIFAR_DEPTHS}")
    _check_choices("cifar_resnet", gamma_init=gamma_init)
    norm = _norm(gamma_init, norm_options)

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


def _check_choices(function: str, **arguments: str) -> None:
    for name, value in arguments.items():
        if value not in _CHOICES[name]:
            raise UserError(
                f"{function}: there is no {name} {value!r}; it is one of {_CHOICES[name]}"
            )


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
    x: tf.Tensor, filters: int, kernel_size: int, strides: int, name: str, blur: bool = False
) -> tf.Tensor:
    """A convolution with ``kernel_size // 2`` zeros on every side of the image.

    Of stride 2, it follows a blur if ``blur`` is set.
    """
    if blur and strides > 1:
        # A convolution of 1x1 would read only every second pixel: the others are not computed.
        subsampling = strides if kernel_size == 1 else 1
        x = BlurPool(subsampling, name=f"{name}_blur")(x)
        strides //= subsampling
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
        # A new one each time: Keras' initializers return the same values in each call.
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
    blur: bool = False,
) -> tf.Tensor:
    """Adds ``convs``, each (filters, kernel size, strides), applied to ``x``, to ``shortcut``."""
    for i, (filters, kernel_size, strides) in enumerate(convs, start=1):
        last = i == len(convs)
        x = _conv(x, filters, kernel_size, strides, f"{name}_conv{i}", blur)
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
