"""How much the operations of a graph compute."""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow as tf

# By type: which of their inputs is the filter [..., in, out], and which has the positions at which
# it is applied; -1: the output.
_CONVOLUTIONS = {
    "Conv2D": (1, -1),
    "Conv2DBackpropInput": (1, 2),
    "Conv2DBackpropFilter": (-1, 2),
    "Conv3D": (1, -1),
    "Conv3DBackpropInputV2": (1, 2),
    "Conv3DBackpropFilterV2": (-1, 2),
    "DepthwiseConv2dNative": (1, -1),
    "DepthwiseConv2dNativeBackpropInput": (1, 2),
    "DepthwiseConv2dNativeBackpropFilter": (-1, 2),
}
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3")
_POOLS = ("MaxPool", "AvgPool", "MaxPoolGrad", "AvgPoolGrad")
# For each value: sums for the mean and the variance, and what is made of them; the gradients of
# offset, scale and inputs.
_OF_A_VALUE = {"FusedBatchNormV3": 7, "FusedBatchNormGradV3": 11}
# These only move values, make them or look at their shape.
_FREE = {
    *("BroadcastTo", "Cast", "ConcatV2", "Const", "ExpandDims", "Fill", "GatherV2", "Identity"),
    *("IdentityN", "MirrorPad", "OnesLike", "Pack", "Pad", "PadV2", "Placeholder"),
    *("PreventGradient", "Rank", "ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Slice"),
    *("Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "StridedSliceGrad", "Tile"),
    *("Transpose", "Unpack", "ZerosLike"),
}


def flops(operations: Iterable[tf.Operation]) -> float:
    """Returns the floating-point operations of some of TensorFlow's, of known shapes.

    Exact for convolutions and products of matrices, two for each multiplication and addition.
    Pools count their windows, batch norm some operations a value; all else counts as one operation
    for each of its greatest tensor's values. What is in functions that they call is not counted.
    """
    return float(sum(map(_flops, operations)))


def _flops(operation: tf.Operation) -> int:
    kind = operation.type
    if kind in _CONVOLUTIONS:
        tensors = [*operation.inputs, operation.outputs[0]]
        weights, positions = (tensors[place].shape for place in _CONVOLUTIONS[kind])
        each = math.prod(weights) // weights[-1]
        if kind.startswith("Depthwise"):  # its last dimension is of outputs for each input
            each //= weights[-2]
        return 2 * math.prod(positions) * each
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
    return values * _OF_A_VALUE.get(kind, 1)


def _values(tensor: tf.Tensor) -> int:
    """Returns the number of floating-point values in a tensor; 0 if its shape is not known."""
    return (tensor.shape.num_elements() or 0) if tensor.dtype.is_floating else 0
