"""AmoebaNets (Real et al. 2018, "Regularized Evolution for Image Classifier Architecture Search").

The networks that GPipe (Huang et al. 2018) trains in pipelines: AmoebaNet-D (L, D), of L normal
cells with D channels in each operation of the first third of them, and AmoebaNet-B (L, D).

``amoebanet_blocks`` makes a network as a sequence of Keras layers, between any two of which a
pipeline can be cut; ``amoebanet`` makes the same network as one model.

The layers with weights are those of torchgpipe's AmoebaNet-D, whose parameter counts are the
paper's. All else is as in Google's code for AmoebaNet (github.com/tensorflow/tpu,
models/official/amoeba_net), where torchgpipe differs: padding is ``"same"``, ``max3x3`` is a
max pool, which torchgpipe replaces with an average, and there is no ReLU of the images, but one
before the global average pool. Google's first convolution is not padded; ours is.

Of the AmoebaNet-B of GPipe's section 4, only (18, 512) and 557 million parameters are published.
This one, with the cells in Google's code and D's stem and classifier, has 560.1 million; the
cause of the difference is unknown. Google's code names a dilation of 2 in an operation of the
reduction cell, but does not apply it; this code does.

Each convolution has no bias, is preceded by a ReLU and followed by a batch norm. Initial weights
are truncated normal with a variance of 2 / fan-out, also of the dense layer, as in Google's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.models.arguments import check_sizes
from imagenet_fast.models.batch_norm import NormOptions, batch_norm, norm_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The smallest image with more than one pixel before the last of five strides of 2.
_MIN_SIZE = 17


class _Design(NamedTuple):
    """The genotype of a cell. Its states 0 and 1 are its two inputs, projected to its channels.

    Attributes:
        operations: five pairs of (input state, name). The next state is the sum of a pair. In a
            reduction cell, operations on states 0 and 1 have a stride of 2.
        outputs: the states that the cell returns, concatenated.
    """

    operations: tuple[tuple[int, str], ...]
    outputs: tuple[int, ...]


# By variant: the normal cell, the reduction cell.
_DESIGNS = {
    "b": (
        _Design(
            (
                *((1, "1x1"), (1, "max3x3")),
                *((1, "none"), (0, "separable3x3")),
                *((1, "1x1"), (0, "separable3x3")),
                *((2, "1x1"), (2, "none")),
                *((1, "avg3x3"), (5, "1x1")),
            ),
            (0, 3, 4, 6),
        ),
        _Design(
            (
                *((0, "max2x2"), (0, "max3x3")),
                *((2, "none"), (1, "3x3")),
                *((2, "dilated5x5"), (2, "max3x3")),
                *((3, "none"), (1, "separable3x3")),
                *((4, "avg3x3"), (3, "1x1")),
            ),
            (5, 6),
        ),
    ),
    "d": (
        _Design(
            (
                *((1, "1x1"), (1, "max3x3")),
                *((1, "none"), (0, "1x7_7x1")),
                *((0, "1x1"), (0, "1x7_7x1")),
                *((2, "max3x3"), (2, "none")),
                *((1, "avg3x3"), (5, "1x1")),
            ),
            (0, 3, 4, 6),
        ),
        _Design(
            (
                *((0, "max2x2"), (0, "max3x3")),
                *((2, "none"), (1, "3x3")),
                *((2, "1x7_7x1"), (2, "max3x3")),
                *((3, "none"), (1, "max2x2")),
                *((2, "avg3x3"), (3, "1x1")),
            ),
            (4, 5, 6),
        ),
    ),
}
AMOEBANET_VARIANTS = tuple(_DESIGNS)

# Operations other than "1x1" and "none": pools and their sizes,
_POOLS = {
    "max2x2": (keras.layers.MaxPooling2D, 2),
    "max3x3": (keras.layers.MaxPooling2D, 3),
    "avg3x3": (keras.layers.AveragePooling2D, 3),
}
# sizes of convolutions with a quarter of the filters, between two of 1x1,
_BOTTLENECKS: dict[str, tuple[int | tuple[int, int], ...]] = {
    "3x3": (3,),
    "1x7_7x1": ((1, 7), (7, 1)),
}
# sizes and dilations of two separable convolutions.
_SEPARABLE = {"separable3x3": (3, 1), "dilated5x5": (5, 2)}
# The operation that brings a cell's second input to the size and channels of its operations.
_PROJECTIONS = {"project": "1x1", "halve": "halve", "keep": "none"}


def amoebanet(
    variant: str,
    num_classes: int = 1000,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    *,
    normal_cells: int = 18,
    cell_filters: int = 208,
    name: str | None = None,
    **norm_options: Unpack[NormOptions],
) -> keras.Model:
    """Makes an AmoebaNet as one model, of the layers of :func:`amoebanet_blocks`.

    Its classifier is three layers: ``last_relu``, ``global_pool`` and ``logits``.

    Args:
        variant: ``"b"`` or ``"d"``.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image, at least 17 x 17; height and width
            may be None.
        normal_cells: GPipe's L, a multiple of 3.
        cell_filters: GPipe's D, a multiple of 8.
        name: the model's name; None: ``amoebanet_<variant>``.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Raises:
        UserError: if there is no such variant, the image is too small, or ``normal_cells`` or
            ``cell_filters`` is not such a multiple.
    """
    check_sizes(f"amoebanet_{variant}", num_classes, input_shape, _MIN_SIZE)
    *blocks, classifier = amoebanet_blocks(
        variant, normal_cells, cell_filters, num_classes, **norm_options
    )
    x = images = keras.Input(input_shape, name="images")
    for block in blocks:
        x = block(x)
    logits = classifier.logits(classifier.features(x))
    return keras.Model(images, logits, name=name or f"amoebanet_{variant}")


def amoebanet_blocks(
    variant: str,
    normal_cells: int = 18,
    cell_filters: int = 208,
    num_classes: int = 1000,
    **norm_options: Unpack[NormOptions],
) -> list[keras.layers.Layer]:
    """Makes an AmoebaNet as a sequence of layers, which have no weights until they are called.

    The L + 6 layers are ``stem1``, a 3x3 convolution of stride 2 with D / 4 channels; ``stem2`` and
    ``stem3``, reduction cells; three stages of L / 3 normal cells, ``stage1_cell1`` and so on,
    with a reduction cell before the second and third, ``stage2_reduction`` and
    ``stage3_reduction``; ``classify``. Reduction cells halve height and width, and double the
    filters: D / 2, D, 2D and 4D. Normal cells have the filters of the cell before.

    Each layer takes the outputs of the one before, the first images. ``stem1`` returns a tensor;
    the cells return (outputs, inputs), each [batch, height, width, channels], with ``inputs`` of
    twice the height and width after a reduction; ``classify`` returns float32 logits [batch,
    num_classes].

    Args:
        variant: ``"b"`` or ``"d"``.
        normal_cells: GPipe's L, a multiple of 3.
        cell_filters: GPipe's D, a multiple of 8.
        num_classes: number of logits.
        **norm_options: of :func:`imagenet_fast.models.batch_norm.norm_arguments`.

    Raises:
        UserError: if there is no such variant, or ``normal_cells`` or ``cell_filters`` is not such
            a multiple.
    """
    if variant not in AMOEBANET_VARIANTS:
        raise UserError(
            f"amoebanet: there is no variant {variant!r}; the variants are {AMOEBANET_VARIANTS}"
        )
    for option, value, factor, why in (
        ("normal_cells", normal_cells, 3, "there are three equal stages"),
        ("cell_filters", cell_filters, 8, "stem2 has convolutions with an eighth of them"),
    ):
        if value < 1 or value % factor:
            raise UserError(
                f"amoebanet: {option}={value}, but must be a multiple of {factor}, as {why}"
            )
    norm = norm_arguments(**norm_options)
    cells = [("stem2", True), ("stem3", True)]
    for stage in (1, 2, 3):
        if stage > 1:
            cells.append((f"stage{stage}_reduction", True))
        cells += [(f"stage{stage}_cell{i}", False) for i in range(1, normal_cells // 3 + 1)]

    filters = cell_filters // 4
    blocks: list[keras.layers.Layer] = [AmoebaStem(filters, norm, name="stem1")]
    # Channels of the tensors so far. A cell's inputs are the last two, of which the first is twice
    # as large if the last cell was a reduction.
    channels, reduced = [filters, filters], False
    for name, reduction in cells:
        if reduction:
            filters *= 2
        before = "halve" if reduced else "keep" if channels[-2] == filters else "project"
        blocks.append(AmoebaCell(variant, reduction, filters, before, norm, name=name))
        channels.append(filters * len(_DESIGNS[variant][reduction].outputs))
        reduced = reduction
    return [*blocks, AmoebaClassifier(num_classes, name="classify")]


@keras.saving.register_keras_serializable("imagenet_fast")
class AmoebaStem(keras.layers.Layer):
    """A 3x3 convolution of stride 2, and its batch norm.

    Input: float [batch, height, width, channels]. Output: [batch, ceil(height / 2),
    ceil(width / 2), filters], in the compute dtype.

    Args:
        filters: of the convolution.
        norm_options: the arguments of ``imagenet_fast.models.batch_norm.batch_norm``.
        **kwargs: Keras' own options (``name``, ``dtype``).
    """

    def __init__(self, filters: int, norm_options: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.norm_options = dict(norm_options)
        self.conv = _conv(filters, 3, 2, name=f"{self.name}_conv", dtype=self.dtype_policy)
        self.norm = batch_norm(**norm_options)(name=f"{self.name}_bn", dtype=self.dtype_policy)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Applies both to a batch of images; batch norm uses batch statistics if ``training``."""
        return self.norm(self.conv(inputs), training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        own = {"filters": self.filters, "norm_options": dict(self.norm_options)}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("imagenet_fast")
class AmoebaCell(keras.layers.Layer):
    """A normal cell or a reduction cell of an AmoebaNet.

    Input: float [batch, height, width, channels], or a tuple of two: the outputs of the cell
    before, and that cell's first input. Output: a tuple of the cell's outputs, in the compute
    dtype, and its first input. The outputs of a reduction cell have height ceil(height / 2) and
    width ceil(width / 2) of the first input.

    Args:
        variant: ``"b"`` or ``"d"``.
        reduction: whether it is a reduction cell.
        filters: channels of each operation; the outputs have a multiple of them.
        before: operation that brings the second input to these channels: ``"project"``, a 1x1
            convolution; ``"halve"``, two of stride 2, for an input of twice the first one's height
            and width; or ``"keep"``, none.
        norm_options: the arguments of ``imagenet_fast.models.batch_norm.batch_norm``.
        **kwargs: Keras' own options (``name``, ``dtype``).
    """

    def __init__(
        self,
        variant: str,
        reduction: bool,
        filters: int,
        before: str,
        norm_options: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.variant = variant
        self.reduction = reduction
        self.filters = filters
        self.before = before
        self.norm_options = dict(norm_options)
        make = functools.partial(
            _operation, filters=filters, norm=batch_norm(**norm_options), dtype=self.dtype_policy
        )
        self.projections = [
            make("1x1", 1, name=f"{self.name}_input1"),
            make(_PROJECTIONS[before], 1, name=f"{self.name}_input2"),
        ]
        self.operations = [
            make(name, 2 if reduction and state < 2 else 1, name=f"{self.name}_operation{number}")
            for number, (state, name) in enumerate(_DESIGNS[variant][reduction].operations, start=1)
        ]

    def call(
        self, inputs: tf.Tensor | tuple[tf.Tensor, tf.Tensor], training: bool | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Applies the cell; batch norms use batch statistics if ``training``."""
        return self._compute(inputs, training)

    # No control flow depends on tensors, and AutoGraph would make tracing several times slower.
    @tf.autograph.experimental.do_not_convert
    def _compute(
        self, inputs: tf.Tensor | tuple[tf.Tensor, tf.Tensor], training: bool | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs, inputs)
        states = [project(x, training=training) for project, x in zip(self.projections, inputs)]
        design = _DESIGNS[self.variant][self.reduction]
        operations = [(i, layer) for (i, _), layer in zip(design.operations, self.operations)]
        for (i, left), (j, right) in zip(operations[::2], operations[1::2]):
            states.append(left(states[i], training=training) + right(states[j], training=training))
        return tf.concat([states[i] for i in design.outputs], axis=-1), inputs[0]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {
            **super().get_config(),
            "variant": self.variant,
            "reduction": self.reduction,
            "filters": self.filters,
            "before": self.before,
            "norm_options": dict(self.norm_options),
        }


@keras.saving.register_keras_serializable("imagenet_fast")
class AmoebaClassifier(keras.layers.Layer):
    """ReLU of the last cell's outputs, global average pool and dense layer.

    Input: a cell's output. Output: float32 [batch, num_classes].

    Args:
        num_classes: number of logits.
        **kwargs: Keras' own options (``name``, ``dtype``).
    """

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.relu = keras.layers.Activation("relu", name="last_relu", dtype=self.dtype_policy)
        self.pool = keras.layers.GlobalAveragePooling2D(name="global_pool", dtype=self.dtype_policy)
        self.logits = keras.layers.Dense(
            num_classes,
            kernel_initializer=_he_normal(),
            # 16-bit logits would make losses and probabilities too coarse.
            dtype="float32",
            name="logits",
        )

    def features(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Returns the dense layer's inputs, [batch, channels]."""
        return self.pool(self.relu(inputs[0]))

    def call(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Returns the logits of a batch."""
        return self.logits(self.features(inputs))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "num_classes": self.num_classes}


class _Chain(keras.layers.Layer):
    """Layers in sequence; none is the identity."""

    def __init__(self, layers: Sequence[keras.layers.Layer], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers = list(layers)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        # Keras passes ``training`` on to the layers that take it.
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class _Halving(keras.layers.Layer):
    """Takes every other pixel, once from the first on and once from the second, in both directions.

    A 1x1 convolution of each makes half of the filters (factorized reduction, Zoph et al. 2017).

    Pixels are taken by slices, not by the convolution's stride: oneDNN's gradient of a strided 1x1
    convolution with fewer than 16 input channels writes outside its buffers (oneDNN issue 6035).
    """

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.convs = [
            _conv(filters // 2, 1, 1, name=f"{self.name}{number}", dtype=self.dtype_policy)
            for number in (1, 2)
        ]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        shifted = tf.pad(inputs, [[0, 0], [0, 1], [0, 1], [0, 0]])[:, 1::2, 1::2]
        return tf.concat([self.convs[0](inputs[:, ::2, ::2]), self.convs[1](shifted)], axis=-1)


def _operation(
    operation: str,
    strides: int,
    *,
    filters: int,
    norm: Callable[..., keras.layers.Layer],
    dtype: keras.mixed_precision.Policy,
    name: str,
) -> _Chain:
    """Returns an operation from a state or input to float [batch, height, width, filters]."""
    layers = []
    if operation in _POOLS:
        pool, size = _POOLS[operation]
        layers.append(pool(size, strides, "same", name=f"{name}_pool", dtype=dtype))
    for number, conv in enumerate(_convs(operation, strides, filters), start=1):
        layers += [
            keras.layers.Activation("relu", name=f"{name}_relu{number}", dtype=dtype),
            conv(name=f"{name}_conv{number}", dtype=dtype),
            norm(name=f"{name}_bn{number}", dtype=dtype),
        ]
    return _Chain(layers, name=name, dtype=dtype)


def _convs(operation: str, strides: int, filters: int) -> list[Callable[..., keras.layers.Layer]]:
    """Returns makers of an operation's convolutions, from their names and dtypes."""
    if operation == "1x1":
        return [functools.partial(_conv, filters, 1, strides)]
    if operation == "halve":
        return [functools.partial(_Halving, filters)]
    if operation in _SEPARABLE:
        separable = functools.partial(_separable_conv, filters, *_SEPARABLE[operation])
        return [functools.partial(separable, strides), functools.partial(separable, 1)]
    if operation in _BOTTLENECKS:
        return [
            functools.partial(_conv, filters // 4, 1, 1),
            *(
                functools.partial(_conv, filters // 4, size, stride)
                for size, stride in zip(_BOTTLENECKS[operation], (strides, 1))
            ),
            functools.partial(_conv, filters, 1, 1),
        ]
    return []


def _conv(
    filters: int, kernel_size: int | tuple[int, int], strides: int, **options: Any
) -> keras.layers.Conv2D:
    return keras.layers.Conv2D(
        filters,
        kernel_size,
        strides,
        "same",
        use_bias=False,
        kernel_initializer=_he_normal(),
        **options,
    )


def _separable_conv(
    filters: int, kernel_size: int, dilation: int, strides: int, **options: Any
) -> keras.layers.SeparableConv2D:
    return keras.layers.SeparableConv2D(
        filters,
        kernel_size,
        strides,
        "same",
        dilation_rate=dilation,
        use_bias=False,
        depthwise_initializer=_he_normal(),
        pointwise_initializer=_he_normal(),
        **options,
    )


def _he_normal() -> keras.initializers.Initializer:
    """Returns a new one each time: Keras' initializers return the same values in each call."""
    return keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="truncated_normal")
