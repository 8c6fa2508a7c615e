"""Optimizers that sum gradients over the replicas before they do anything else with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


class SumsFirst:
    """Makes an optimizer of Keras 3 begin with the sum of the gradients over the replicas.

    Keras 3 clips the gradients of each replica, and sums what is left (``BaseOptimizer`` before
    ``TFOptimizer._backend_update_step``), so that several devices take another step than one. Keras
    2 sums first.

    ``gradient_accumulation_steps`` and ``ema_overwrite_frequency`` work under ``MirroredStrategy``,
    too, where those of Keras fail: it does not allow their conditions in a replica.

    Attributes:
      replicas_without_all_reduce: number of replicas in an update whose gradients are already
        all-reduced.
    """

    _trainable_variables: list[Any]
    replicas_without_all_reduce = 0

    def sum_over_replicas(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns a replica's gradients summed over the replicas; to be called in each of them."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return gradients
        return context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables, as Keras' method, by the sums of the gradients."""
        gradients, variables = list(grads), trainable_variables or self._trainable_variables
        if keras.backend.backend() == "tensorflow" and not self.replicas_without_all_reduce:
            given = [index for index, gradient in enumerate(gradients) if gradient is not None]
            summed = self.sum_over_replicas(
                [gradients[index] for index in given], [variables[index] for index in given]
            )
            for index, gradient in zip(given, summed):
                gradients[index] = gradient
        super().apply(gradients, trainable_variables)  # type: ignore[misc]  # the optimizer's

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars  # they are summed

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        """Keras' method, with its conditions outside of the replicas."""
        keras_own: Any = super()
        own: Any = self
        steps, variables = own.gradient_accumulation_steps, trainable_variables
        overwrites = own.use_ema and own.ema_overwrite_frequency
        if not (steps or overwrites) or not _needs_merge_calls():
            keras_own._backend_apply_gradients(grads, variables)
            return

        def update(gradients: list[Any]) -> None:
            gradients = own._clip_gradients(gradients)
            own._apply_weight_decay(variables)
            own._backend_update_step(gradients, variables, own.learning_rate)

        def update_by_mean(gradients: list[Any]) -> None:
            update([(g + earlier) / steps for g, earlier in zip(gradients, sums)])
            own._backend_reset_gradient_accumulators()

        def add(gradients: list[Any]) -> None:
            own._backend_increment_gradient_accumulators(gradients, sums)

        def update_or_add(strategy: tf.distribute.Strategy, gradients: Any) -> None:
            each = functools.partial(strategy.extended.call_for_each_replica, args=(gradients,))
            _if_last(own._iterations, steps, lambda: each(update_by_mean), lambda: each(add))

        def overwrite(_: tf.distribute.Strategy) -> None:
            averaged = functools.partial(own.finalize_variable_values, own._trainable_variables)
            _if_last(own.iterations, overwrites, averaged)

        context = tf.distribute.get_replica_context()
        if steps:
            sums = [own._accumulated_gradients[own._get_variable_index(v)] for v in variables]
            context.merge_call(update_or_add, args=(grads,))
        else:
            update(grads)
        if own.use_ema:
            own._update_model_variables_moving_average(own._trainable_variables)
        if overwrites:
            context.merge_call(overwrite)


def _needs_merge_calls() -> bool:
    """Whether replicas update variables together, as those of ``MirroredStrategy``."""
    return (
        keras.backend.backend() == "tensorflow"
        and tf.distribute.get_strategy().num_replicas_in_sync > 1
        and not tf.__internal__.distribute.strategy_supports_no_merge_call()
    )


def _if_last(
    step: Any, every: int, true: Callable[[], None], false: Callable[[], None] = lambda: None
) -> None:
    """Calls a function in the last of ``every`` steps, counted from 0, else the other one."""
    tf.cond(tf.equal((tf.convert_to_tensor(step) + 1) % every, 0), true, false)
