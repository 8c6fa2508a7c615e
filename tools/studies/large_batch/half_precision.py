"""LARS in float16, to show the updates that are lost in rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.optimizers import LARS


@keras.saving.register_keras_serializable("large_batch_study")
class HalfPrecisionLARS(LARS):
    """LARS on float16 weights, with norms, learning rates and momentum in float16.

    The variables are float32, but their values are always representable in float16. Gradients are
    not scaled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Updates of single weights: lost ones, and all.
        self._counts = tf.Variable(tf.zeros(2, tf.float64), trainable=False, name="updates")

    @classmethod
    def like(cls, optimizer: LARS) -> HalfPrecisionLARS:
        """Returns an optimizer with the options of another one."""
        return cls.from_config(optimizer.get_config())

    def lost_fraction(self) -> float:
        """Returns the fraction of all updates of single weights that were lost in rounding."""
        lost, all_updates = self._counts.numpy()
        return float(lost / all_updates)

    def trust_ratios(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        """Returns the ratios, float16."""
        one = tf.ones([], tf.float16)
        ratios = []
        for gradient, variable in zip(gradients, variables):
            index = self._index(variable)
            if not self.trust_mask[index]:
                ratios.append(one)
                continue
            weight_norm, gradient_norm = _norm(variable), _norm(gradient)
            decay = tf.constant(self._decay_of(index), tf.float16)
            ratio = tf.constant(self.eeta, tf.float16) * weight_norm
            ratio /= gradient_norm + decay * weight_norm
            ratios.append(tf.where((weight_norm > 0) & (gradient_norm > 0), ratio, one))
        return ratios

    def update_step(
        self, gradient: tuple[tf.Tensor, tf.Tensor], variable: tf.Variable, learning_rate: Any
    ) -> None:
        """Applies one gradient, which comes with its trust ratio, to its variable."""
        gradient, ratio = gradient
        index = self._index(variable)
        buffer = self.momentums[index]
        weight, gradient, velocity = (
            tf.cast(value, tf.float16) for value in (variable, gradient, buffer)
        )
        gradient += tf.constant(self._decay_of(index), tf.float16) * weight
        rate = tf.cast(learning_rate, tf.float16) * ratio
        velocity = tf.constant(self.momentum, tf.float16) * velocity + rate * gradient
        updated = weight - velocity
        lost = tf.math.count_nonzero((updated == weight) & (velocity != 0), dtype=tf.float64)
        self._counts.assign_add([lost, tf.cast(tf.size(weight), tf.float64)])
        buffer.assign(tf.cast(velocity, buffer.dtype))
        variable.assign(tf.cast(updated, variable.dtype))


def _norm(values: Any) -> tf.Tensor:
    values = tf.cast(values, tf.float16)
    return tf.sqrt(tf.reduce_sum(values * values))
