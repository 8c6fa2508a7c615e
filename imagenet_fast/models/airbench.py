"""The networks of airbench (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU").

Three groups of two or three 3x3 convolutions, on patches of the images that a fixed first
convolution whitens.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.models.arguments import check_sizes
from imagenet_fast.models.batch_norm import batch_norm
from imagenet_fast.models.cifar import (
    PYTORCH_WEIGHTS,
    check_image_and_width,
    conv_block,
    max_pool_logits,
)

# By the percentage reached: channels of the first group and multiples of them in all three,
# convolutions in each group, momentum of batch norm.
_PUBLISHED = {
    94: (64, (1, 4, 4), 2, 0.6),
    95: (128, (1, 3, 3), 2, 0.6),
    96: (128, (1, 3, 4), 3, 0.9),
}
_PUBLISHED_LOGITS_SCALE = 1 / 9
# Of the convolutions in a group; after the third, its first outputs are added.
_STEPS = ("conv_pool_bn_gelu", "conv_bn_gelu", "conv_bn")
AIRBENCH_SIZES = tuple(_PUBLISHED)


def airbench(
    size: int,
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    width: int = 0,
    identity_init: bool = True,
    logits_scale: float = 0.0,
    batch_norm_momentum: float | None = None,
    batch_norm_epsilon: float = 1e-12,
    batch_norm_group_size: int = 1,
    ghost_batch_size: int = 0,
    name: str | None = None,
) -> keras.Model:
    """Makes a network of airbench.

    ``whitening``, a fixed 2x2 convolution without padding to twice as many channels as a patch
    has numbers (24), with a bias that is trained; ``group1`` to ``group3``, each of
    conv-pool-BN-GELU, then conv-BN-GELU; the maximum over what is left of the image (3x3 of
    32x32); a dense layer. Batch norms have no gamma. 96 has a third convolution in each group,
    to whose batch norm's outputs the group's first activations are added before the last GELU.

    The filters of ``whitening`` must be set from the data, by the ``adapt`` of
    :class:`imagenet_fast.layers.PatchWhitening`.

    Args:
        size: 94, 95 or 96, the percentage of CIFAR-10's test images that it was made for.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image, at least 9 x 9; height and width may
            be None.
        width: channels of the first group; those of the others are in proportion. 0: as
            published, 64 for 94 and 128 for 95 and 96.
        identity_init: begin the 3x3 convolutions as the identity in as many of their filters as
            they have input channels.
        logits_scale: what the dense layer's outputs are multiplied by. 0: the published 1/9.
        batch_norm_momentum: fraction of the old value in each update of the moving averages; None:
            as published, 0.6 for 94 and 95, 0.9 for 96.
        batch_norm_epsilon: added to the variance.
        batch_norm_group_size: neighbouring replicas that take the statistics together.
        ghost_batch_size: images of a replica that take the statistics together; 0: all.
        name: the model's name; None makes it ``airbench<size>``.

    Returns:
        An un-compiled functional model from float images [batch, height, width, channels],
        normalized, to float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such size, the image is too small, or the width is negative.
    """
    check_sizes(num_classes, input_shape)
    if size not in AIRBENCH_SIZES:
        raise UserError(f"airbench: there is no size {size}; the sizes are {AIRBENCH_SIZES}")
    check_image_and_width(f"airbench{size}", input_shape, 9, width)
    published_width, multiples, convs, momentum = _PUBLISHED[size]
    norm = batch_norm(
        momentum if batch_norm_momentum is None else batch_norm_momentum,
        batch_norm_epsilon,
        batch_norm_group_size,
        ghost_batch_size=ghost_batch_size,
        scale=False,
    )

    images = keras.Input(input_shape, name="images")
    x = PatchWhitening(
        2, padding="valid", negatives=True, use_bias=True, epsilon=5e-4, name="whitening"
    )(images)
    x = keras.layers.Activation("gelu", name="whitening_gelu")(x)
    for group, multiple in enumerate(multiples, start=1):
        outputs = []
        for conv, steps in enumerate(_STEPS[:convs], start=1):
            x = conv_block(
                x,
                multiple * (width or published_width),
                steps,
                f"group{group}_block{conv}",
                norm=norm,
                activation=functools.partial(keras.layers.Activation, "gelu"),
                kernel_initializer=IdentityFilters(**PYTORCH_WEIGHTS) if identity_init else None,
            )
            outputs.append(x)
        if convs == len(_STEPS):
            x = keras.layers.Add(name=f"group{group}_add")([outputs[0], x])
            x = keras.layers.Activation("gelu", name=f"group{group}_gelu")(x)
    logits = max_pool_logits(x, num_classes, logits_scale or _PUBLISHED_LOGITS_SCALE)
    return keras.Model(images, logits, name=name or f"airbench{size}")


@keras.saving.register_keras_serializable(package="imagenet_fast")
class IdentityFilters(keras.initializers.VarianceScaling):
    """Makes the first filters of a convolution return its inputs, and the others random.

    Filter i is 1 at its centre in channel i and 0 elsewhere, for as many as there are input
    channels; Keras' ``VarianceScaling``, whose arguments these are, makes the others.
    """

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """Returns a kernel [height, width, channels, filters], of odd height and width."""
        height, width, channels, filters = shape
        random = super().__call__(shape, dtype, **kwargs)[..., min(channels, filters) :]
        identity = tf.eye(channels, min(channels, filters), dtype=random.dtype)
        above, left = height // 2, width // 2
        around = [[above, above], [left, left], [0, 0], [0, 0]]
        return tf.concat([tf.pad(identity[None, None], around), random], axis=-1)
