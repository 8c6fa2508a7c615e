"""Seeds of a network's random layers: reproducible, also in resumed runs, and by replica."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2, layers_in, per_replica_variable
from imagenet_fast.distribute.one_call import local_variable
from imagenet_fast.layers import micro_batch

if not KERAS_2:
    from keras.src.backend.common import global_state

_GLOBAL_GENERATOR = "global_seed_generator"


def next_seed(state: Any, owner: Any) -> tf.Tensor:
    """Returns the seed of a random operation, int64 [2], and counts the call.

    It is a function of a key, the number of calls in training, and the logical replica.
    Micro-batches (``layers.micro_batch``) may be computed twice: their index replaces the number of
    calls, and :func:`count` is called after all of them.

    Args:
      state: the key and the number of calls, [2], a copy in each replica with equal values.
      owner: the layer that draws, or its generator.
    """
    context = tf.distribute.get_replica_context()
    replica, part = micro_batch.place(context.replica_id_in_sync_group if context else 0)
    fold_in = tf.random.experimental.stateless_fold_in
    seed = fold_in(tf.cast(tf.convert_to_tensor(state), tf.int64), replica)
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


def draw_by_replica(network: keras.layers.Layer, again: bool = False) -> None:
    """Makes the random layers of Keras 3 in a network draw by :func:`next_seed`.

    Keras' own generators cannot count in the replicas of a strategy. To be called in the strategy's
    scope. In Keras 2, it does nothing.

    Args:
      network: whose layers draw.
      again: whether those that do already get new states, of the same values, on the device in
        scope; else they keep theirs.
    """
    for generator in _generators(network):
        does_already = isinstance(generator.next, functools.partial)
        if does_already and not again:
            continue
        key, calls = generator.state.numpy().tolist()
        value = [key, calls if does_already else 0]
        generator.state = per_replica_variable(
            generator,
            "seed_generator_state",
            [2],
            lambda shape, dtype=None, value=value: tf.constant(value, dtype, shape),
            # Keras' uint32 cannot be sent to other workers.
            dtype="int64",
        )
        generator.next = functools.partial(_next_of, generator)


class UnseededDraws:
    """What random operations of Keras 3 draw that have no seed, as those of ConvNeXt's layers.

    Keras has a global generator for them, which no checkpoint has. Here they are a function of the
    step, the replica, and the number of draws before in the step. Made in the strategy's scope.

    Args:
      key: of the run.

    Attributes:
      state: of the draws in a step.
      is_used: whether an operation has drawn, if only while it was traced.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self.is_used = False
        # No weight: it begins anew in each step.
        self.state = local_variable(tf.zeros([2], tf.int64), "unseeded_draws")

    @contextlib.contextmanager
    def of_step(self, step: Any) -> Iterator[None]:
        """Inside, operations without a seed draw by this step; to be called in each replica."""
        start = tf.constant([self._key, 0], tf.int64)
        step = tf.cast(tf.convert_to_tensor(step), tf.int64)
        self.state.assign(tf.random.experimental.stateless_fold_in(start, step))
        before = global_state.get_global_attribute(_GLOBAL_GENERATOR)
        global_state.set_global_attribute(_GLOBAL_GENERATOR, self)
        try:
            yield
        finally:
            global_state.set_global_attribute(_GLOBAL_GENERATOR, before)

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns a seed, as the ``next`` of Keras' generators."""
        del ordered  # draws are alike
        self.is_used = True
        return tf.cast(next_seed(self.state, self), tf.uint32)


def _next_of(generator: Any, ordered: bool = True) -> tf.Tensor:
    del ordered  # draws are alike
    return tf.cast(next_seed(generator.state, generator), tf.uint32)


def _generators(network: keras.layers.Layer) -> list[Any]:
    if KERAS_2:
        return []
    found = [own for layer in layers_in(network) for own in layer._seed_generators]
    return list({id(own): own for own in found}.values())
