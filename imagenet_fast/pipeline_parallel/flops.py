"""Floating-point operations of the operations of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow as tf

# By type: the indices, among the inputs and the output (-1), of the image or its gradient, of the
# filter [..., in, out] or its gradient, and of the tensor with one position for each application.
_CONVOLUTIONS = {
    "Conv2D": (0, 1, -1),
    "Conv2DBackpropInput": (-1, 1, 2),
    "Conv2DBackpropFilter": (0, -1, 2),
    "Conv3D": (0, 1, -1),
    "Conv3DBackpropInputV2": (-1, 1, 2),
    "Conv3DBackpropFilterV2": (0, -1, 2),
    "DepthwiseConv2dNative": (0, 1, -1),
    "DepthwiseConv2dNativeBackpropInput": (-1, 1, 2),
    "DepthwiseConv2dNativeBackpropFilter": (0, -1, 2),
}
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3")
_POOLS = ("MaxPool", "AvgPool", "MaxPoolGrad", "AvgPoolGrad")
# Operations per value: mean, variance and normalization; gradients of offset, scale and inputs.
_PER_VALUE = {"FusedBatchNormV3": 7, "FusedBatchNormGradV3": 11}
# They only move values, create them or read their shape.
_FREE = {
    *("BroadcastTo", "Cast", "ConcatV2", "Const", "ExpandDims", "Fill", "GatherV2", "Identity"),
    *("IdentityN", "MirrorPad", "OnesLike", "Pack", "Pad", "PadV2", "Placeholder"),
    *("PreventGradient", "Rank", "ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Slice"),
    *("Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "StridedSliceGrad", "Tile"),
    *("Transpose", "Unpack", "ZerosLike"),
}


def flops(operations: Iterable[tf.Operation], padding: bool = True) -> float:
    """Returns the floating-point operations of TensorFlow operations of known shapes.

    Exact for convolutions and matrix products, with two for each multiply-add. Pooling counts its
    windows, batch norm a few operations per value; all others count one per value of their largest
    tensor. Operations inside called functions are not counted.

    Args:
      operations: of a graph.
      padding: whether to count multiplications by padding zeros. Papers do: a 3x3 filter has nine
        at each position. XLA does not.
    """
    return float(sum(_flops(operation, padding) for operation in operations))


def is_matrix(operation: tf.Operation) -> bool:
    """Whether an operation is a convolution or a matrix product."""
    return operation.type in _CONVOLUTIONS or operation.type in _PRODUCTS


def rows(operation: tf.Operation) -> int:
    """Returns the number of rows that a matrix operation multiplies by its weights.

    For a convolution, the filter's positions in all images; for a dense layer, the images.
    """
    if operation.type in _CONVOLUTIONS:
        tensors = [*operation.inputs, operation.outputs[0]]
        positions = tensors[_CONVOLUTIONS[operation.type][2]].shape
        channels = 1 if operation.get_attr("data_format").startswith(b"NC") else -1
        return math.prod(positions) // positions[channels]
    return operation.inputs[0].shape[-2]


def _flops(operation: tf.Operation, padding: bool) -> int:
    kind = operation.type
    if kind in _CONVOLUTIONS:
        tensors = [*operation.inputs, operation.outputs[0]]
        image, weights, positions = (tensors[place].shape for place in _CONVOLUTIONS[kind])
        each = math.prod(weights) // weights[-1]
        if kind.startswith("Depthwise"):  # whose last dimension is outputs per input channel
            each //= weights[-2]
        fraction = 1.0 if padding else _unpadded_fraction(operation, image, weights, positions)
        return round(2 * math.prod(positions) * each * fraction)
    if kind in _PRODUCTS:
        flipped = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        summed = operation.inputs[0].shape[-2 if flipped else -1]
        return 2 * _values(operation.outputs[0]) * summed
    if kind in _FREE:
        return 0
    values = max(map(_values, [*operation.inputs, *operation.outputs]), default=0)
    if kind in _POOLS:
        pooled = operation.inputs[-1] if kind.endswith("Grad") else operation.outputs[0]
        return _values(pooled) * math.prod(operation.get_attr("ksize"))
    return values * _PER_VALUE.get(kind, 1)


def _unpadded_fraction(
    operation: tf.Operation,
    image: tf.TensorShape,
    weights: tf.TensorShape,
    positions: tf.TensorShape,
) -> float:
    """Returns the fraction of a convolution's multiplications that are not with padding."""
    rank = len(weights) - 2
    first = 2 if operation.get_attr("data_format").startswith(b"NC") else 1
    fraction = 1.0
    for axis in range(rank):
        size, count = image[first + axis], positions[first + axis]
        stride = operation.get_attr("strides")[first + axis]
        dilation = operation.get_attr("dilations")[first + axis]
        taps = weights[axis]
        padding = operation.get_attr("padding")
        before = 0
        if padding == b"SAME":
            before = max((count - 1) * stride + (taps - 1) * dilation + 1 - size, 0) // 2
        elif padding == b"EXPLICIT":
            before = operation.get_attr("explicit_paddings")[2 * (first + axis)]
        within = sum(
            0 <= position * stride + tap * dilation - before < size
            for position in range(count)
            for tap in range(taps)
        )
        fraction *= within / (count * taps)
    return fraction


def _values(tensor: tf.Tensor) -> int:
    """Returns the number of floating-point values in a tensor; 0 if its shape is not known."""
    return (tensor.shape.num_elements() or 0) if tensor.dtype.is_floating else 0
