"""Optimizers that sum gradients over the replicas before they do anything else with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class SumsFirst:
    """Makes an optimizer of Keras 3 begin with the sum of the gradients over the replicas.

    Keras 3 clips the gradients of each replica, and sums what is left (``BaseOptimizer`` before
    ``TFOptimizer._backend_update_step``), so that several devices take another step than one. Keras
    2 sums first.
    """

    _trainable_variables: list[Any]

    def sum_over_replicas(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients summed over the replicas; to be called in each of them.

        Args:
          gradients: of this replica.
          variables: theirs.
        """
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return gradients
        return context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables, as Keras' method, by the sums of the gradients."""
        gradients, variables = list(grads), trainable_variables or self._trainable_variables
        if keras.backend.backend() == "tensorflow":
            given = [index for index, gradient in enumerate(gradients) if gradient is not None]
            summed = self.sum_over_replicas(
                [gradients[index] for index in given], [variables[index] for index in given]
            )
            for index, gradient in zip(given, summed):
                gradients[index] = gradient
        super().apply(gradients, trainable_variables)  # type: ignore[misc]  # the optimizer's

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars  # they are summed
