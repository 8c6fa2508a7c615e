"""Moving averages of batch norm over whole batches that are computed in micro-batches.

Each micro-batch is normalized by its own statistics, and computed twice where its activations are
not kept. The moving averages move once a batch, by the statistics of all of it (Huang et al. 2018,
section 2.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import GhostBatchNormalization


class Moments(NamedTuple):
    """What micro-batches add up to, for one layer.

    The values are taken relative to the moving mean, which stays as it is until the batch ends:
    E[x^2] - E[x]^2 would lose the variance to rounding where the mean is large.

    Attributes:
      count: values of a channel, float32.
      offset: the sum of their distances from the moving mean, [channels].
      square: the sum of the squares of these, [channels]; of ghost batch norm, the sum of its
        variances, of which the moving average takes the mean.
    """

    count: tf.Tensor
    offset: tf.Tensor
    square: tf.Tensor


def batch_norms(layers: Sequence[keras.layers.Layer]) -> list[keras.layers.BatchNormalization]:
    """Returns all batch norms in some layers, each once, in a fixed order."""
    found = dict.fromkeys(own for layer in layers for own in (layer, *layer.submodules))
    return [own for own in found if isinstance(own, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def observed(norms: Sequence[keras.layers.BatchNormalization]) -> Iterator[dict[int, Moments]]:
    """Keeps batch norms from moving their averages, and notes what they would move them by.

    Args:
      norms: called in training inside, each once.

    Yields:
      The moments of each layer's inputs, by its place in ``norms``.

    Raises:
      UserError: inside, if one is called twice in training, or in a graph within this one.
    """
    moments: dict[int, Moments] = {}
    with contextlib.ExitStack() as stack:
        for place, norm in enumerate(norms):
            stack.enter_context(_observed(norm, place, moments))
        yield moments


def commit(norms: Sequence[keras.layers.BatchNormalization], moments: dict[int, Moments]) -> None:
    """Moves the averages by what all micro-batches of a batch add up to."""
    for place, own in moments.items():
        norm = norms[place]
        offset = own.offset / own.count
        variance = own.square / own.count
        if not isinstance(norm, GhostBatchNormalization):
            # Rounding may make the difference negative.
            variance = tf.maximum(variance - tf.square(offset), 0.0)
            if norm.fused:  # as its kernel has it
                variance *= own.count / tf.maximum(own.count - 1, 1.0)
        mean, average = norm.moving_mean, norm.moving_variance
        with tf.device(mean.device):
            mean.assign_add((1 - norm.momentum) * tf.cast(offset, mean.dtype))
        with tf.device(average.device):
            change = tf.cast(variance, average.dtype) - average
            average.assign_add((1 - norm.momentum) * change)


@contextlib.contextmanager
def _observed(
    norm: keras.layers.BatchNormalization, place: int, moments: dict[int, Moments]
) -> Iterator[None]:
    """The same for one layer, by way of the two methods through which Keras moves the averages."""
    own: dict[str, tf.Tensor] = {}
    graph = tf.compat.v1.get_default_graph()

    def call(inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        outputs = type(norm).call(norm, inputs, *args, **kwargs)
        if own:
            if place in moments:
                raise UserError(
                    f"batch norm {norm.name!r} is called twice in training, by which a pipeline "
                    "cannot move its averages: give each call a layer of its own"
                )
            if tf.compat.v1.get_default_graph() is not graph:
                raise UserError(
                    f"batch norm {norm.name!r} is called in a tf.function, tf.cond or loop inside "
                    "a block, out of which a pipeline cannot take its statistics: call it outside"
                )
            values = tf.cast(tf.size(inputs) // tf.size(own["mean"]), tf.float32)
            moments[place] = _moments(norm, values, own["mean"], own["variance"])
            own.clear()
        return outputs

    def keep(variable: tf.Variable, value: tf.Tensor, *_: Any) -> None:
        name = "mean" if variable is norm.moving_mean else "variance"
        own[name] = tf.cast(value, tf.float32)

    # With a momentum of 0, what it would assign is the statistics themselves.
    changes = {
        "momentum": 0.0,
        "call": call,
        "_assign_new_value": keep,
        "_assign_moving_average": keep,
    }
    before = {name: norm.__dict__[name] for name in changes if name in norm.__dict__}
    # Not as Keras would, which looks into what it is given.
    norm.__dict__.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del norm.__dict__[name]
        norm.__dict__.update(before)


def _moments(
    norm: keras.layers.BatchNormalization, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> Moments:
    offset = mean - tf.cast(norm.moving_mean, mean.dtype)
    if not isinstance(norm, GhostBatchNormalization):
        if norm.fused:
            variance *= (count - 1) / count
        variance += tf.square(offset)
    return Moments(count, count * offset, count * variance)
