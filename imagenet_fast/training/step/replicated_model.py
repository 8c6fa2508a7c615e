"""A Keras model whose replicas evaluate and save the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.distribute.one_call import (
    assign_local,
    local_values,
    one_call,
    read_from_first_replica,
)
from imagenet_fast.layers.seeds import seed_states
from imagenet_fast.optimizers.lookahead import Lookahead
from imagenet_fast.optimizers.shadow_weights import ShadowWeights
from imagenet_fast.optimizers.weight_average import WeightAverage


class ReplicatedModel(keras.Model):
    """A functional model with shadow weights, whose replicas agree on batch-norm statistics.

    Each replica updates batch-norm statistics of its own; Keras would evaluate with each one's and
    save the first's. All methods are called outside of replicas, by all workers.

    Attributes:
      weight_average: the moving average of the weights, made in the strategy's scope, before
        training; None: there is none.
      lookahead: the slow weights, made likewise; None: there are none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_average: WeightAverage | None = None
        self.lookahead: Lookahead | None = None
        strategy = self.distribute_strategy
        self._average_statistics = one_call(strategy, self._average_statistics_in_replica)

    def average_batch_norm_statistics(self) -> None:
        """Sets batch norm's moving averages to their mean over the replicas, in each of them."""
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return
        self._average_statistics()
        for shadow in self._shadow_weights():  # which include statistics
            with shadow.in_use():
                self._average_statistics()

    @contextlib.contextmanager
    def averaged_batch_norm_statistics(self) -> Iterator[None]:
        """Averages the statistics; inside, reading one reads the first replica's, not a mean."""
        self.average_batch_norm_statistics()
        with self.batch_norm_statistics_of_first_replica():
            yield

    def batch_norm_statistics_of_first_replica(self) -> contextlib.AbstractContextManager[None]:
        """Inside, reading a batch-norm statistic reads the first replica's, not a mean."""
        return read_from_first_replica(statistics_in(self))

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has its averaged weights, if it keeps an average."""
        if self.weight_average is None:
            return contextlib.nullcontext()
        return self.weight_average.in_use()

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Inside, the model is the one to evaluate and save, the same on all replicas.

        It has its averaged weights and the mean of the replicas' batch-norm statistics; it keeps
        the latter.
        """
        with self.averaged_batch_norm_statistics(), self.averaged_weights():
            yield

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        """Restores batch-norm statistics and random states at its end."""
        strategy = self.distribute_strategy
        variables = states_in(self)

        @tf.function(autograph=False)
        def read() -> Any:
            return strategy.run(lambda: local_values(variables))

        @tf.function(autograph=False)
        def restore(before: Any) -> None:  # in each replica its own
            strategy.run(lambda values: assign_local(variables, values), args=(before,))

        before = read()
        try:
            yield
        finally:
            restore(before)

    def restart_shadow_weights(self) -> None:
        """Sets the shadow weights to the current weights."""
        for shadow in self._shadow_weights():
            shadow.restart()

    def _shadow_weights(self) -> list[ShadowWeights]:
        return [shadow for shadow in (self.weight_average, self.lookahead) if shadow is not None]

    def _average_statistics_in_replica(self) -> None:
        statistics = statistics_in(self)
        if statistics:
            context = tf.distribute.get_replica_context()
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, local_values(statistics))
            assign_local(statistics, means)


def statistics_in(network: keras.layers.Layer) -> list[Any]:
    """Returns the moving averages of batch norm in a network."""
    return [
        variable
        for layer in layers_in(network)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in (layer.moving_mean, layer.moving_variance)
    ]


def states_in(network: keras.layers.Layer) -> list[Any]:
    """Returns what a forward pass in training may change.

    These are the averages of batch norm, random layers' states and, of other layers with variables
    that are not trained, such as ``keras.layers.SpectralNormalization``, all variables.
    """
    others = [
        variable
        for layer in layers_in(network)
        if not isinstance(layer, keras.layers.BatchNormalization)
        and getattr(layer, "_non_trainable_variables", None)  # its own; Keras 2 has no such name
        for variable in layer.variables
    ]
    states = [*statistics_in(network), *seed_states(network), *others]
    return list({id(state): state for state in states}.values())
