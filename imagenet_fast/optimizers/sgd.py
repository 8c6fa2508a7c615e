"""Stochastic gradient descent with momentum, as the ImageNet papers use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.optimizers.schedules import Schedule


@keras.saving.register_keras_serializable("imagenet_fast")
class SGD(keras.optimizers.Optimizer):
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
        # One fused kernel updates a variable: there is nothing left for XLA to fuse.
        kwargs.setdefault("jit_compile", False)
        # Not passed on: Keras would decay apart from the gradient.
        super().__init__(name=name, weight_decay=None, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov
        self.l2_weight_decay = weight_decay
        self.weight_decay_mask = None if weight_decay_mask is None else list(weight_decay_mask)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes a momentum buffer for each of ``var_list``.

        Raises:
          ValueError: if ``weight_decay_mask`` is not as long as ``var_list``.
        """
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        if self.weight_decay_mask is not None and len(self.weight_decay_mask) != len(var_list):
            raise ValueError(
                f"weight_decay_mask has {len(self.weight_decay_mask)} entries, but there are "
                f"{len(var_list)} trainable variables"
            )
        self.momentums = [
            self.add_variable_from_reference(model_variable=variable, variable_name="m")
            for variable in var_list
        ]
        self._built = True

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Applies one gradient to its variable."""
        index = self._index_dict[self._var_key(variable)]
        decayed = self.weight_decay_mask is None or self.weight_decay_mask[index]
        # An embedding's is sparse. One of another dtype would make the kernel abort the process.
        gradient = tf.convert_to_tensor(gradient, variable.dtype)
        if self.l2_weight_decay and decayed:
            gradient += tf.cast(self.l2_weight_decay, gradient.dtype) * variable
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.momentums[index].handle,
            lr=tf.cast(self.learning_rate, gradient.dtype),
            grad=gradient,
            momentum=tf.cast(self.momentum, gradient.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        config = super().get_config()
        config.update(
            learning_rate=self._serialize_hyperparameter(self._learning_rate),
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.l2_weight_decay,
            weight_decay_mask=self.weight_decay_mask,
        )
        return config
