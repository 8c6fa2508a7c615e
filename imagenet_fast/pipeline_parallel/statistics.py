"""Moving averages of batch norm, updated once per batch of several micro-batches.

Each micro-batch is normalized by its own statistics, possibly twice, because of recomputation. The
moving averages are updated by the statistics of the whole batch (Huang et al. 2018, section 2.2).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.layers import GhostBatchNormalization


class Moments(NamedTuple):
    """Sums over micro-batches, for one layer.

    They are relative to the moving mean, which does not change before the batch ends: E[x^2] -
    E[x]^2 would lose the variance to rounding if the mean is large.

    Attributes:
      count: values per channel, float32.
      offset: sum of the values' differences from the moving mean, [channels].
      square: sum of the squared differences, [channels]; for ghost batch norm the sum of its
        variances, whose mean updates the moving average.
    """

    count: tf.Tensor
    offset: tf.Tensor
    square: tf.Tensor


def batch_norms(layers: Sequence[keras.layers.Layer]) -> list[keras.layers.BatchNormalization]:
    """Returns all batch norms in some layers, each once, in a fixed order."""
    found = dict.fromkeys(inner for layer in layers for inner in layers_in(layer))
    return [layer for layer in found if isinstance(layer, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def observed(norms: Sequence[keras.layers.BatchNormalization]) -> Iterator[dict[int, Moments]]:
    """Collects the statistics of batch norms, without updating their moving averages.

    Each of these layers is called once in training in this context.

    Yields:
      The moments of each layer's inputs, by its index in ``norms``.

    Raises:
      UserError: in the context, if a layer is called twice in training, or in an inner graph.
    """
    moments: dict[int, Moments] = {}
    with contextlib.ExitStack() as stack:
        for place, norm in enumerate(norms):
            stack.enter_context(_observed(norm, place, moments))
        yield moments


def commit(norms: Sequence[keras.layers.BatchNormalization], moments: dict[int, Moments]) -> None:
    """Updates the moving averages by the moments of a whole batch."""
    for place, sums in moments.items():
        norm = norms[place]
        offset = sums.offset / sums.count
        variance = sums.square / sums.count
        if not isinstance(norm, GhostBatchNormalization):
            # Rounding may make the difference negative.
            variance = tf.maximum(variance - tf.square(offset), 0.0)
            if _is_unbiased(norm):
                variance *= sums.count / tf.maximum(sums.count - 1, 1.0)
        mean, average = norm.moving_mean.value, norm.moving_variance.value
        with tf.device(mean.device):
            mean.assign_add((1 - norm.momentum) * tf.cast(offset, mean.dtype))
        with tf.device(average.device):
            change = tf.cast(variance, average.dtype) - average
            average.assign_add((1 - norm.momentum) * change)


def _is_unbiased(norm: keras.layers.BatchNormalization) -> bool:
    """Returns whether the moving variance gets Bessel's correction."""
    return getattr(norm, "unbiased_variance", False)


@contextlib.contextmanager
def _observed(
    norm: keras.layers.BatchNormalization, place: int, moments: dict[int, Moments]
) -> Iterator[None]:
    """Like :func:`observed` for one layer, whose ``call`` it replaces."""
    if getattr(norm, "renorm", False):  # Keras 3.12 lacks it
        raise UserError(
            f"batch norm {norm.name!r} has renorm=True, whose statistics a pipeline cannot update "
            "once per batch: leave it out"
        )
    graph = tf.compat.v1.get_default_graph()

    def call(inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        with keras.StatelessScope() as scope:  # keeps the variables, and what is assigned to them
            outputs = type(norm).call(norm, inputs, *args, **kwargs)
        mean, variance = map(scope.get_current_value, (norm.moving_mean, norm.moving_variance))
        if mean is None:
            return outputs
        if place in moments:
            raise UserError(
                f"batch norm {norm.name!r} is called twice in training, and a pipeline cannot "
                "update its moving averages by both: give each call a layer of its own"
            )
        if tf.compat.v1.get_default_graph() is not graph:
            raise UserError(
                f"batch norm {norm.name!r} is called in a tf.function, tf.cond or loop inside "
                "a block, where a pipeline cannot read its statistics: call it outside"
            )
        mask = inspect.signature(type(norm).call).bind(norm, inputs, *args, **kwargs)
        mean, variance = tf.cast(mean, tf.float32), tf.cast(variance, tf.float32)
        count = _count(inputs, mask.arguments.get("mask"), mean)
        moments[place] = _moments(norm, count, mean, variance)
        return outputs

    # With a momentum of 0, the values to assign are the statistics themselves.
    changes = {"momentum": 0.0, "call": call}
    if _is_unbiased(norm):
        changes["unbiased_variance"] = False
    before = {name: norm.__dict__[name] for name in changes if name in norm.__dict__}
    # Not by setattr, because Keras would track the values.
    norm.__dict__.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del norm.__dict__[name]
        norm.__dict__.update(before)


def _count(inputs: tf.Tensor, mask: Any, mean: tf.Tensor) -> tf.Tensor:
    """Returns the number of values per channel, float32, that the statistics are of."""
    if mask is None:
        return tf.cast(tf.size(inputs) // tf.size(mean), tf.float32)
    weights = tf.broadcast_to(tf.cast(mask, tf.float32)[..., tf.newaxis], tf.shape(inputs))
    return tf.reduce_sum(weights) / tf.cast(tf.size(mean), tf.float32)


def _moments(
    norm: keras.layers.BatchNormalization, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> Moments:
    offset = mean - tf.cast(norm.moving_mean, mean.dtype)
    if not isinstance(norm, GhostBatchNormalization):
        variance += tf.square(offset)
    return Moments(count, count * offset, count * variance)
