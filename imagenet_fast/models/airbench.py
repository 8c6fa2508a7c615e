"""The networks of airbench (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU").

A fixed first convolution whitens patches of the images; three groups of two or three 3x3
convolutions follow.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.models.arguments import check_sizes, check_width
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments
from imagenet_fast.models.cifar import PYTORCH_WEIGHTS, conv_block, max_pool_logits
from imagenet_fast.models.options import check_activation

if TYPE_CHECKING:
    from typing_extensions import Unpack

# By percentage reached: channels of the first group, their multiples in all three groups,
# convolutions per group, momentum of batch norm, initial bias of the whitening layer (94 leaves it
# to PyTorch, the others set it to 0). Last is the proxy that selects images for 96.
_PUBLISHED: dict[int | str, tuple[int, tuple[int, ...], int, float, str]] = {
    94: (64, (1, 4, 4), 2, 0.6, "pytorch"),
    95: (128, (1, 3, 3), 2, 0.6, "zeros"),
    96: (128, (1, 3, 4), 3, 0.9, "zeros"),
    "96_proxy": (32, (1, 2, 2), 2, 0.9, "none"),
}
_PUBLISHED_LOGITS_SCALE = 1 / 9
# Of the convolutions in a group; after the third, the outputs of the first are added.
_STEPS = ("conv_pool_bn_gelu", "conv_bn_gelu", "conv_bn")
AIRBENCH_SIZES = tuple(_PUBLISHED)


def airbench(
    size: int | str,
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    width: int = 0,
    activation: str = "auto",
    logits_scale: float = 0.0,
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes a network of airbench.

    Layers: ``whitening``, a fixed 2x2 convolution without padding and with a trainable bias, to
    twice as many channels as a patch has elements (24), whose bias starts as in PyTorch in 94, as
    in airbench94_muon, and at 0 in 95 and 96; ``group1`` to ``group3``, each
    conv-pool-BN-GELU, then conv-BN-GELU; a global max pool (3x3 for 32x32 images); a dense layer.
    Batch norms have no gamma. As many filters of each 3x3 convolution as it has input channels
    start as the identity. Size 96 has a third convolution and batch norm in each group, and adds
    the group's first activations before the last GELU. Size ``"96_proxy"``, the network of
    airbench96_faster that selects images for 96, has no bias in ``whitening``.

    The filters of ``whitening`` must be set from data, by the ``adapt`` of
    :class:`imagenet_fast.layers.PatchWhitening`.

    Args:
        size: 94, 95 or 96, the test accuracy on CIFAR-10 that it was made for, in percent; or
            ``"96_proxy"``.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image, at least 9 x 9; height and width may
            be None.
        width: channels of the first group, to which the others are in proportion; 0: as
            published, 64 for 94, 128 for 95 and 96, and 32 for 96_proxy.
        activation: ``"gelu"``, or ``"silu"`` for SiLU instead of GELU in the groups, as in
            Hiverge's speedrun of CIFAR-10 (2025); that after ``whitening`` is GELU. ``"auto"`` is
            the published GELU.
        logits_scale: factor of the dense layer's outputs; 0: the published 1/9.
        name: the model's name; None: ``airbench<size>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`;
            by default momentum as published, 0.6 for 94 and 95, 0.9 for 96 and its proxy, and
            epsilon 1e-12.

    Raises:
        UserError: if there is no such size or activation, the image is too small, or the width is
            negative.
    """
    check_sizes(f"airbench{size}", num_classes, input_shape, 9)
    check_width(f"airbench{size}", width)
    if size not in AIRBENCH_SIZES:
        raise UserError(f"airbench: there is no size {size}; the sizes are {AIRBENCH_SIZES}")
    check_activation(f"airbench{size}", activation)
    word = "silu" if activation == "silu" else "gelu"
    layer = functools.partial(keras.layers.Activation, "swish" if word == "silu" else word)
    published_width, multiples, convs, momentum, bias = _PUBLISHED[size]
    limit = (2 * 2 * input_shape[2]) ** -0.5  # of PyTorch's biases, by fan-in
    if norm_options.get("batch_norm_momentum") is None:
        norm_options["batch_norm_momentum"] = momentum
    if norm_options.get("batch_norm_epsilon") is None:
        norm_options["batch_norm_epsilon"] = 1e-12
    norm = batch_norm(**norm_arguments(**norm_options), scale=False)

    images = keras.Input(input_shape, name="images")
    x = PatchWhitening(
        2,
        padding="valid",
        negatives=True,
        use_bias=bias != "none",
        bias_initializer=(
            keras.initializers.RandomUniform(-limit, limit) if bias == "pytorch" else "zeros"
        ),
        epsilon=5e-4,
        name="whitening",
    )(images)
    x = keras.layers.Activation("gelu", name="whitening_gelu")(x)
    for group, multiple in enumerate(multiples, start=1):
        outputs = []
        for conv, steps in enumerate(_STEPS[:convs], start=1):
            x = conv_block(
                x,
                multiple * (width or published_width),
                steps.replace("gelu", word),
                f"group{group}_block{conv}",
                norm=norm,
                activation=layer,
                kernel_initializer=IdentityFilters(**PYTORCH_WEIGHTS),
            )
            outputs.append(x)
        if convs == len(_STEPS):
            x = keras.layers.Add(name=f"group{group}_add")([outputs[0], x])
            x = layer(name=f"group{group}_{word}")(x)
    logits = max_pool_logits(x, num_classes, logits_scale or _PUBLISHED_LOGITS_SCALE)
    return keras.Model(images, logits, name=name or f"airbench{size}")


@keras.saving.register_keras_serializable(package="imagenet_fast")
class IdentityFilters(keras.initializers.VarianceScaling):
    """Initializes the first filters of a convolution as the identity, the others randomly.

    Filter i is 1 at its centre in channel i and 0 elsewhere, for each input channel;
    ``VarianceScaling``, whose arguments these are, makes the others.
    """

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """Returns a kernel [height, width, channels, filters], of odd height and width."""
        height, width, channels, filters = shape
        random = super().__call__(shape, dtype, **kwargs)[..., min(channels, filters) :]
        identity = tf.eye(channels, min(channels, filters), dtype=random.dtype)
        above, left = height // 2, width // 2
        around = [[above, above], [left, left], [0, 0], [0, 0]]
        return tf.concat([tf.pad(identity[None, None], around), random], axis=-1)
