"""Stochastic gradient descent with momentum, as the ImageNet papers use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.optimizers.momentum import MomentumOptimizer
from imagenet_fast.optimizers.schedules import Schedule


@keras.saving.register_keras_serializable("imagenet_fast")
class SGD(MomentumOptimizer):
    """SGD with momentum and weight decay in the gradient.

    With ``g = gradient + weight_decay * w``::

        u = momentum * u + g
        w = w - rate * u                      (Nesterov: w - rate * (momentum * u + g))

    This is equation (9) of Goyal et al. 2017: the learning rate is outside the momentum buffer, so
    that a change of the learning rate needs no correction. ``rate_in_momentum=True`` has it inside,
    which is their equation (10) and what Page 2019 does::

        v = momentum * v + rate * g
        w = w - v                             (Nesterov: w - momentum * v - rate * g)

    Keras' own SGD has it inside, too, but decays weights apart from the gradient.

    Args:
      learning_rate: a number or a schedule.
      momentum: share of the momentum buffer that a step keeps, in [0, 1).
      nesterov: whether to look ahead.
      weight_decay: times the weight, added to its gradient (the loss term is
        ``weight_decay / 2 * |w|^2``).
      rate_in_momentum: whether the momentum buffer holds updates or gradients.
      weight_decay_mask: for each trainable variable in order, whether it is decayed, or a factor
        of its decay (True is 1, False 0); None: all are. ``variable_roles`` helps to make it.
      rate_factors: for each trainable variable in order, a factor of its rate; None: 1. Page 2019
        has 64 for biases, and 1 / 64 as the factor of their decay.
      name: of the optimizer.
      **kwargs: Keras' own options (``clipnorm``, ``use_ema``, ...).
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        rate_in_momentum: bool = False,
        weight_decay_mask: Sequence[float] | None = None,
        rate_factors: Sequence[float] | None = None,
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            momentum,
            nesterov,
            rate_in_momentum,
            weight_decay,
            weight_decay_mask,
            rate_factors,
            name,
            **kwargs,
        )

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Applies one gradient to its variable."""
        index = self._index(variable)
        # An embedding's is sparse. One of another dtype would make the kernel abort the process.
        gradient = tf.convert_to_tensor(gradient, variable.dtype)
        rate = self._rate_of(index)
        scale = -rate if self.rate_in_momentum else 1.0
        gradient = self._add_decay(gradient, variable, index, buffer_scale=scale)
        self._move(gradient, variable, index, rate)
