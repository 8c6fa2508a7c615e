"""What the optimizers of this package share: momentum, and rate and decay by the variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.schedules import Schedule


class MomentumOptimizer(keras.optimizers.Optimizer):
    """Holds a momentum buffer for each variable, and adds the decay of weights to gradients.

    Args:
      learning_rate: a number or a schedule.
      momentum: share of the momentum buffer that a step keeps, in [0, 1).
      nesterov: whether to look ahead.
      rate_in_momentum: whether the momentum buffer holds updates or gradients.
      weight_decay: times the weight, added to its gradient.
      weight_decay_mask: for each trainable variable in order, whether it is decayed, or a factor
        of its decay; None: all are.
      rate_factors: for each trainable variable in order, a factor of its rate; None: 1.
      name: of the optimizer.
      **kwargs: Keras' own options (``clipnorm``, ``use_ema``, ...).

    Raises:
      UserError: if ``momentum`` or ``weight_decay`` is out of range.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        momentum: float,
        nesterov: bool,
        rate_in_momentum: bool,
        weight_decay: float,
        weight_decay_mask: Sequence[float] | None,
        rate_factors: Sequence[float] | None,
        name: str,
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is {momentum}, but must be at least 0 and below 1")
        if weight_decay < 0:
            raise UserError(f"weight_decay is {weight_decay}, but must not be negative")
        # Few fused kernels update a variable: there is nothing left for XLA to fuse.
        kwargs.setdefault("jit_compile", False)
        # Not passed on: Keras would decay apart from the gradient.
        super().__init__(name=name, weight_decay=None, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov
        self.rate_in_momentum = rate_in_momentum
        self.l2_weight_decay = weight_decay
        self.weight_decay_mask = as_list(weight_decay_mask, float)
        self.rate_factors = as_list(rate_factors, float)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes a momentum buffer for each of ``var_list``.

        Raises:
          UserError: if what is given for each variable does not fit ``var_list``.
        """
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._check(var_list)
        self.momentums = [
            self.add_variable_from_reference(model_variable=variable, variable_name="m")
            for variable in var_list
        ]
        self._built = True

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Is for Keras' decay apart from the gradient, which these optimizers do not have.

        Raises:
          UserError: always, naming what does the same here.
        """
        raise UserError(
            f"{self.name} leaves variables out of weight decay by weight_decay_mask, an entry for "
            "each trainable variable: imagenet_fast.optimizers.variable_roles helps to make it"
        )

    def _check(self, var_list: Sequence[tf.Variable]) -> None:
        """Raises a UserError if the options are not for these variables."""
        for name, entries in self._by_variable().items():
            if entries is not None and len(entries) != len(var_list):
                raise UserError(
                    f"{name} has {len(entries)} entries, but there are {len(var_list)} trainable "
                    "variables; give one for each, in their order"
                )

    def _by_variable(self) -> dict[str, list[Any] | None]:
        """Returns the options that have an entry for each variable."""
        return {"weight_decay_mask": self.weight_decay_mask, "rate_factors": self.rate_factors}

    def _index(self, variable: tf.Variable) -> int:
        return self._index_dict[self._var_key(variable)]

    def _rate_of(self, index: int) -> tf.Tensor:
        """The learning rate of a variable, a scalar."""
        factor = 1.0 if self.rate_factors is None else self.rate_factors[index]
        rate = tf.convert_to_tensor(self.learning_rate)
        return rate if factor == 1 else factor * rate

    def _decay_of(self, index: int) -> float:
        """The weight decay of a variable."""
        factor = 1.0 if self.weight_decay_mask is None else self.weight_decay_mask[index]
        return factor * self.l2_weight_decay

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

    def _move(
        self,
        gradient: tf.Tensor,
        variable: tf.Variable,
        index: int,
        rate: tf.Tensor,
    ) -> None:
        """Takes a gradient, with its decay, into the momentum buffer, and moves the variable.

        The learning rate goes into the buffer if ``rate_in_momentum``, with the opposite sign.
        """
        if self.rate_in_momentum:
            apply = tf.raw_ops.ResourceApplyKerasMomentum
        else:
            apply = tf.raw_ops.ResourceApplyMomentum
        apply(
            var=variable.handle,
            accum=self.momentums[index].handle,
            lr=tf.cast(rate, gradient.dtype),
            grad=gradient,
            momentum=tf.constant(self.momentum, gradient.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        config = super().get_config()
        config.update(
            learning_rate=self._serialize_hyperparameter(self._learning_rate),
            momentum=self.momentum,
            nesterov=self.nesterov,
            rate_in_momentum=self.rate_in_momentum,
            weight_decay=self.l2_weight_decay,
            **self._by_variable(),
        )
        return config


def as_list(
    entries: Sequence[Any] | None, kind: Callable[[Any], float | bool]
) -> list[float | bool] | None:
    """Returns what is given for each variable as JSON can hold it."""
    return None if entries is None else [kind(entry) for entry in entries]
