"""AlexNet with batch norm, as trained at batch 64K by Jia et al. 2018 (arXiv 1807.11205).

Krizhevsky's network in BVLC Caffe's sizes, but without groups and local response normalization.
Each convolutional stage has a batch norm: in stages 1 to 4 between the convolution and its ReLU
and, added by Jia et al. because the distribution drifts most there, after the last pool in stage 5.
The convolutions have biases, which gives the publication's 62 million parameters in 26 tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.models.arguments import check_sizes
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The smallest image that leaves a pixel after the three pools.
_MIN_SIZE = 64


def alexnet_bn(
    num_classes: int = 1000,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    *,
    dropout: float = 0.5,
    batch_norm_after_pool5: bool = True,
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes an AlexNet with batch norm.

    Images of 227 pixels fit the first convolution (11x11, stride 4) without padding, as in BVLC
    Caffe. Sizes that do not fit, such as 224 pixels, are padded with two zeros on every side, as by
    Krizhevsky and torchvision; both sizes give 6x6 after the last pool and so the same weights.

    Args:
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image, at least 64 x 64.
        dropout: fraction of the outputs of both hidden dense layers dropped in training.
        batch_norm_after_pool5: whether to have the fifth batch norm, in stage 5.
        name: the model's name; None: ``alexnet_bn``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Raises:
        UserError: if the image is too small or its size unknown, or dropout is not in [0, 1).
    """
    check_sizes("alexnet_bn", num_classes, input_shape, _MIN_SIZE)
    height, width, _ = input_shape
    if height is None or width is None:
        raise UserError(
            f"alexnet_bn: images of {height} x {width} pixels have no fixed size, which its dense "
            f"layers need; use one of at least {_MIN_SIZE} x {_MIN_SIZE}, without train_sizes, "
            "size_ramp and eval_image_size"
        )
    if not 0 <= dropout < 1:
        raise UserError(f"alexnet_bn: dropout={dropout} is not in [0, 1)")

    norm = batch_norm(**norm_arguments(**norm_options))

    x = images = keras.Input(input_shape, name="images")
    margins = (_first_margin(height), _first_margin(width))
    if any(margins):
        x = keras.layers.ZeroPadding2D(margins, name="conv1_pad")(x)
    x = _conv(x, 96, 11, 4, "valid", "conv1")
    x = _relu(norm(name="bn1")(x), "relu1")
    x = _pool(x, "pool1")
    x = _conv(x, 256, 5, 1, "same", "conv2")
    x = _relu(norm(name="bn2")(x), "relu2")
    x = _pool(x, "pool2")
    x = _conv(x, 384, 3, 1, "same", "conv3")
    x = _relu(norm(name="bn3")(x), "relu3")
    x = _conv(x, 384, 3, 1, "same", "conv4")
    x = _relu(norm(name="bn4")(x), "relu4")
    x = _conv(x, 256, 3, 1, "same", "conv5")
    x = _pool(_relu(x, "relu5"), "pool5")
    if batch_norm_after_pool5:
        x = norm(name="bn5")(x)

    x = keras.layers.Flatten(name="flatten")(x)
    for layer in ("6", "7"):
        x = _relu(_dense(x, 4096, 0.005, f"fc{layer}"), f"relu{layer}")
        x = Dropout(dropout, name=f"dropout{layer}")(x)
    # 16-bit logits would make losses and probabilities too coarse.
    x = _dense(x, num_classes, 0.01, "logits", dtype="float32")
    return keras.Model(images, x, name=name or "alexnet_bn")


def _first_margin(size: int) -> int:
    return 0 if (size - 11) % 4 == 0 else 2


def _conv(
    x: tf.Tensor, filters: int, kernel_size: int, strides: int, padding: str, name: str
) -> tf.Tensor:
    return keras.layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding,
        # By fan-in, as in Jia et al.
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, mode="fan_in", distribution="untruncated_normal"
        ),
        name=name,
    )(x)


def _relu(x: tf.Tensor, name: str) -> tf.Tensor:
    return keras.layers.Activation("relu", name=name)(x)


def _pool(x: tf.Tensor, name: str) -> tf.Tensor:
    return keras.layers.MaxPooling2D(3, 2, name=name)(x)


def _dense(
    x: tf.Tensor, units: int, stddev: float, name: str, dtype: str | None = None
) -> tf.Tensor:
    """A dense layer with weights N(0, stddev^2): Gaussian in Jia et al., stddev of BVLC Caffe."""
    initializer = keras.initializers.RandomNormal(stddev=stddev)
    return keras.layers.Dense(units, kernel_initializer=initializer, dtype=dtype, name=name)(x)
