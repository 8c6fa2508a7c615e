"""What the optimizers of this package share: momentum, and decay of some of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.optimizers.schedules import Schedule


class MomentumOptimizer(keras.optimizers.Optimizer):
    """Holds a momentum buffer for each variable, and adds the decay of weights to gradients.

    Args:
      learning_rate: a number or a schedule.
      momentum: share of the momentum buffer that a step keeps, in [0, 1).
      nesterov: whether to look ahead.
      weight_decay: times the weight, added to its gradient.
      weight_decay_mask: for each trainable variable in order, whether it is decayed; None: all.
      name: of the optimizer.
      **kwargs: Keras' own options (``clipnorm``, ``use_ema``, ...).
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        weight_decay_mask: Sequence[bool] | None,
        name: str,
        **kwargs: Any,
    ) -> None:
        # Few fused kernels update a variable: there is nothing left for XLA to fuse.
        kwargs.setdefault("jit_compile", False)
        # Not passed on: Keras would decay apart from the gradient.
        super().__init__(name=name, weight_decay=None, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov
        self.l2_weight_decay = weight_decay
        self.weight_decay_mask = as_list(weight_decay_mask)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes a momentum buffer for each of ``var_list``.

        Raises:
          ValueError: if a mask is not as long as ``var_list``.
        """
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        for name, mask in self._masks().items():
            if mask is not None and len(mask) != len(var_list):
                raise ValueError(
                    f"{name} has {len(mask)} entries, but there are {len(var_list)} trainable "
                    "variables"
                )
        self.momentums = [
            self.add_variable_from_reference(model_variable=variable, variable_name="m")
            for variable in var_list
        ]
        self._built = True

    def _masks(self) -> dict[str, list[bool] | None]:
        return {"weight_decay_mask": self.weight_decay_mask}

    def _index(self, variable: tf.Variable) -> int:
        return self._index_dict[self._var_key(variable)]

    def _decay_of(self, index: int) -> float:
        """The weight decay of a variable."""
        decayed = self.weight_decay_mask is None or self.weight_decay_mask[index]
        return self.l2_weight_decay if decayed else 0.0

    def _add_decay(
        self,
        gradient: tf.Tensor,
        variable: tf.Variable,
        index: int,
        buffer_scale: tf.Tensor | float | None,
    ) -> tf.Tensor:
        """Returns the gradient with the decay, or puts the decay into the momentum buffer.

        The buffer becomes ``momentum * buffer + buffer_scale * gradient``. Adding
        ``buffer_scale * decay / momentum * w`` to it beforehand is the same as adding
        ``decay * w`` to the gradient, but needs no memory for a sum. It is possible where the
        gradient goes nowhere else.

        Args:
          gradient: of the variable's dtype.
          variable: what the gradient is of.
          index: of the variable.
          buffer_scale: what the gradient is multiplied by in the buffer; None: it also goes
            elsewhere.
        """
        decay = self._decay_of(index)
        if not decay:
            return gradient
        if buffer_scale is None or self.nesterov or not self.momentum:
            return gradient + tf.constant(decay, gradient.dtype) * variable
        share = tf.constant(-decay / self.momentum, gradient.dtype)
        tf.raw_ops.ResourceApplyGradientDescent(
            var=self.momentums[index].handle,
            alpha=share * tf.cast(buffer_scale, gradient.dtype),
            delta=variable,
        )
        return gradient

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


def as_list(mask: Sequence[bool] | None) -> list[bool] | None:
    """Returns a mask as JSON can hold it."""
    return None if mask is None else [bool(entry) for entry in mask]
