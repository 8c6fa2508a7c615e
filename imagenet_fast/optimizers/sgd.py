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

    This is equation (9) of Goyal et al. 2017: the rate is outside the momentum buffer, so that a
    change of the rate needs no correction. Keras' own SGD has it inside (equation 10), and
    decays weights apart from the gradient.

    Args:
      learning_rate: a number or a schedule.
      momentum: share of the momentum buffer that a step keeps, in [0, 1).
      nesterov: whether to look ahead.
      weight_decay: times the weight, added to its gradient (the loss term is
        ``weight_decay / 2 * |w|^2``).
      weight_decay_mask: for each trainable variable in order, whether it is decayed; None: all
        are. ``variable_roles`` helps to make it.
      name: of the optimizer.
      **kwargs: Keras' own options (``clipnorm``, ``use_ema``, ...).
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        weight_decay_mask: Sequence[bool] | None = None,
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate, momentum, nesterov, weight_decay, weight_decay_mask, name, **kwargs
        )

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Applies one gradient to its variable."""
        index = self._index(variable)
        # An embedding's is sparse. One of another dtype would make the kernel abort the process.
        gradient = tf.convert_to_tensor(gradient, variable.dtype)
        gradient = self._add_decay(gradient, variable, index, buffer_scale=1.0)
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.momentums[index].handle,
            lr=tf.cast(self.learning_rate, gradient.dtype),
            grad=gradient,
            momentum=tf.constant(self.momentum, gradient.dtype),
            use_nesterov=self.nesterov,
        )
