"""Seeds of a network's random layers: reproducible, also in resumed runs, and by replica."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2, layers_in, per_replica_variable
from imagenet_fast.layers import micro_batch


def next_seed(state: Any, owner: Any) -> tf.Tensor:
    """Returns the seed of a random operation, int64 [2], and counts the call.

    It is a function of a key, the number of calls in training, and the replica. Micro-batches
    (``layers.micro_batch``) may be computed twice: their index replaces the number of calls, and
    :func:`count` is called after all of them.

    Args:
      state: the key and the number of calls, [2], a copy in each replica with equal values.
      owner: the layer that draws, or its generator.
    """
    context = tf.distribute.get_replica_context()
    replica = context.replica_id_in_sync_group if context else 0
    fold_in = tf.random.experimental.stateless_fold_in
    seed = fold_in(tf.cast(tf.convert_to_tensor(state), tf.int64), replica)
    part = micro_batch.current()
    if part is None:
        count(state)
        return seed
    seed = fold_in(seed, part)
    call = micro_batch.count_call(owner)
    return fold_in(seed, call) if call else seed  # the first as in earlier versions


def count(state: Any) -> None:
    """Makes the next call draw another seed; to be called in each replica."""
    state.assign_add(tf.constant([0, 1], state.dtype))


def seed_states(network: keras.layers.Layer) -> list[Any]:
    """Returns the states of the random layers of a network after :func:`draw_by_replica`."""
    own = [layer.state for layer in layers_in(network) if hasattr(layer, "draws_by_replica")]
    return own + [generator.state for generator in _generators(network)]


def draw_by_replica(network: keras.layers.Layer) -> None:
    """Makes the random layers of Keras 3 in a network draw by :func:`next_seed`.

    Keras' own generators cannot count in the replicas of a strategy. To be called in the strategy's
    scope. In Keras 2, it does nothing.
    """
    for generator in _generators(network):
        key = int(generator.state.numpy()[0])
        generator.state = per_replica_variable(
            generator,
            "seed_generator_state",
            [2],
            lambda shape, dtype=None, key=key: tf.constant([key, 0], dtype, shape),
            dtype="uint32",
        )
        generator.next = functools.partial(_next_of, generator)


def _next_of(generator: Any, ordered: bool = True) -> tf.Tensor:
    del ordered  # draws are alike
    return tf.cast(next_seed(generator.state, generator), tf.uint32)


def _generators(network: keras.layers.Layer) -> list[Any]:
    if KERAS_2:
        return []
    found = [own for layer in layers_in(network) for own in layer._seed_generators]
    return list({id(own): own for own in found}.values())
