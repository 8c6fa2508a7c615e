"""ResNet-9, the network of "How to Train Your ResNet" (Page 2019).

Eight 3x3 convolutions and a dense layer, the network of DAWNBench's record for 94% on CIFAR-10.
Each of Page's changes to the network ("Bag of tricks") is an option.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.models.arguments import check_sizes, check_width
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments
from imagenet_fast.models.cifar import conv_block, max_pool_logits
from imagenet_fast.models.options import check_activation, check_choices

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PUBLISHED_WIDTH = 64
_PUBLISHED_LOGITS_SCALE = 0.125


def resnet9(
    num_classes: int = 10,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    *,
    width: int = 0,
    pool_order: str = "conv_bn_relu_pool",
    activation: str = "auto",
    celu_alpha: float = 0.075,
    batch_norm_scale: bool = True,
    logits_scale: float = 0.0,
    whitening: bool = False,
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes Page's ResNet-9; its defaults are his baseline.

    Layers: a convolution ``prep``; ``layer1`` to ``layer3``, each a convolution and a 2x2 max pool,
    the first and third with a residual branch of two more convolutions; a global max pool (4x4 for
    32x32 images); a dense layer. Convolutions are 3x3, without bias, with batch norm and
    activation.

    Args:
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image, at least 8 x 8; height and width may
            be None.
        width: channels of ``prep``; the layers have 2, 4 and 8 times as many; 0: the published 64.
        pool_order: position of the layers' pool; see the option of this name.
        activation: ``"relu"``, the published one, which ``"auto"`` is too, or ``"celu"``, which is
            smooth.
        celu_alpha: minus the minimum of CELU.
        batch_norm_scale: whether to train gamma; otherwise it is 1. Page freezes it at 1/4, which
            is equivalent to 1 with 4 times the ``celu_alpha`` and a quarter of the
            ``logits_scale``; his are 0.3 and 1/16.
        logits_scale: factor of the dense layer's outputs; 0: the published 1/8.
        whitening: whether to start with ``whitening``, a fixed 3x3 convolution that whitens patches
            of the image; ``prep`` is then 1x1. Its filters must be set from data, by the ``adapt``
            of :class:`imagenet_fast.layers.PatchWhitening`.
        name: the model's name; None: ``resnet9``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Raises:
        UserError: if the image is too small, there is no such order or activation, a number is
            out of range, or batch norm is to have statistics both of several replicas and of parts
            of one.
    """
    check_sizes("resnet9", num_classes, input_shape, 8)
    check_width("resnet9", width)
    check_activation("resnet9", activation)
    check_choices("resnet9", pool_order=pool_order)
    word, layer = "relu", functools.partial(keras.layers.Activation, "relu")
    if activation == "celu":
        word, layer = "celu", functools.partial(CELU, celu_alpha)
    block = functools.partial(
        conv_block,
        norm=batch_norm(**norm_arguments(**norm_options), scale=batch_norm_scale),
        activation=layer,
    )
    plain = f"conv_bn_{word}"
    pooled = pool_order.replace("relu", word)

    x = images = keras.Input(input_shape, name="images")
    if whitening:
        x = PatchWhitening(3, padding="same", name="whitening")(x)
    width = width or _PUBLISHED_WIDTH
    x = block(x, width, plain, "prep", kernel_size=1 if whitening else 3)
    for number in (1, 2, 3):
        name_of_layer = f"layer{number}"
        filters = 2**number * width
        x = block(x, filters, pooled, name_of_layer)
        if number != 2:
            y = block(x, filters, plain, f"{name_of_layer}_residual1")
            y = block(y, filters, plain, f"{name_of_layer}_residual2")
            x = keras.layers.Add(name=f"{name_of_layer}_add")([x, y])
    logits = max_pool_logits(x, num_classes, logits_scale or _PUBLISHED_LOGITS_SCALE)
    return keras.Model(images, logits, name=name or "resnet9")


@keras.saving.register_keras_serializable(package="imagenet_fast")
class CELU(keras.layers.Layer):
    """The activation max(0, x) + min(0, alpha (exp(x / alpha) - 1)).

    Barron 2017, "Continuously Differentiable Exponential Linear Units" (arXiv 1704.07483).

    Args:
        alpha: minus the minimum, positive.
        **kwargs: Keras' options (``name``, ``dtype``).

    Raises:
        UserError: if alpha is not positive.
    """

    def __init__(self, alpha: float, **kwargs: Any) -> None:
        if not alpha > 0:
            raise UserError(f"CELU: alpha={alpha}, but must be positive")
        super().__init__(**kwargs)
        self.alpha = alpha

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the activations of ``inputs``, of any shape, in their dtype."""
        return _celu(inputs, self.alpha)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "alpha": self.alpha}


def _celu(x: tf.Tensor, alpha: float) -> tf.Tensor:
    @tf.custom_gradient
    def celu(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        elu = tf.nn.elu(x / alpha)

        # CELU at x and ELU at x / alpha have the same derivative: scaling the gradient by alpha
        # and back would take two more passes over memory.
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.EluGrad(gradients=upstream, outputs=elu)

        return alpha * elu, gradient

    return celu(x)
