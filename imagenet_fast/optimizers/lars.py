"""Layer-wise adaptive rate scaling, for batches of thousands of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.momentum import MomentumOptimizer, as_list
from imagenet_fast.optimizers.schedules import Schedule


@keras.saving.register_keras_serializable("imagenet_fast")
class LARS(MomentumOptimizer):
    """SGD whose rate is, for each weight tensor, in proportion to the norm of that tensor.

    You, Gitman and Ginsburg 2017, in the form of Google's TPU and MLPerf code::

        trust = eeta * |w| / (|gradient| + weight_decay * |w| + epsilon)     (1 if a norm is 0)
        v = momentum * v + rate * trust * (gradient + weight_decay * w)
        w = w - v                       (Nesterov: w - momentum * v - rate * trust * (...))

    ``rate_in_momentum=False`` has the learning rate outside of the momentum, so that a change of
    the learning rate acts on past gradients, too::

        v = momentum * v + trust * (gradient + weight_decay * w)
        w = w - rate * v

    Norms are float32 (float64 where a variable is), whatever the precision of activations. In
    float16 they would overflow or vanish.

    Args:
      learning_rate: a number or a schedule.
      momentum: share of the momentum buffer that a step keeps, in [0, 1).
      weight_decay: times the weight, added to its gradient.
      eeta: the trust coefficient.
      epsilon: added to the norm of the gradient.
      nesterov: whether to look ahead.
      rate_in_momentum: whether the momentum buffer holds updates (MLPerf's scaled momentum) or
        gradients.
      weight_decay_mask: for each trainable variable in order, whether it is decayed, or a factor
        of its decay (True is 1, False 0); None: all are. The recipes decay weights alone: no
        biases, no gamma or beta of batch norm.
      rate_factors: for each trainable variable in order, a factor of its rate; None: 1.
      trust_mask: for each trainable variable in order, whether its rate is scaled; None: all are.
        The recipes scale that of weights alone. ``variable_roles`` helps to make both.
      name: of the optimizer.
      **kwargs: Keras' own options (``clipnorm``, ``use_ema``, ...).
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eeta: float = 0.001,
        epsilon: float = 0.0,
        nesterov: bool = False,
        rate_in_momentum: bool = True,
        weight_decay_mask: Sequence[float] | None = None,
        rate_factors: Sequence[float] | None = None,
        trust_mask: Sequence[bool] | None = None,
        name: str = "LARS",
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
        if eeta <= 0:
            raise UserError(f"eeta is {eeta}, but must be positive")
        self.eeta = eeta
        self.epsilon = epsilon
        self.trust_mask = as_list(trust_mask, bool)

    def trust_ratios(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        """Returns what the norms multiply the learning rate of each variable by.

        Args:
          gradients: without decay.
          variables: what they are of, among those that the optimizer was built with.

        Returns:
          Scalars, float32, or float64 if a variable is; 1 for those that ``trust_mask`` excludes.
        """
        indices = [self._index(variable) for variable in variables]
        scaled = [self.trust_mask is None or self.trust_mask[index] for index in indices]
        dtype = tf.float64 if any(v.dtype == tf.float64 for v in variables) else tf.float32
        one = tf.ones([], dtype)
        if not any(scaled):
            return [one for _ in variables]
        # All at once: one kernel for each norm, and the arithmetic on one vector.
        weight_norms = _norms([v for v, wanted in zip(variables, scaled) if wanted], dtype)
        gradient_norms = _norms([g for g, wanted in zip(gradients, scaled) if wanted], dtype)
        decays = [self._decay_of(index) for index, wanted in zip(indices, scaled) if wanted]
        denominators = gradient_norms + tf.constant(decays, dtype) * weight_norms
        if self.epsilon:
            denominators += tf.constant(self.epsilon, dtype)
        ratios = tf.where(
            (weight_norms > 0) & (gradient_norms > 0),
            tf.constant(self.eeta, dtype) * weight_norms / denominators,
            one,
        )
        ratio = iter(tf.unstack(ratios, num=sum(scaled)))
        return [next(ratio) if wanted else one for wanted in scaled]

    def _internal_apply_gradients(
        self, grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]]
    ) -> tf.Variable:
        """Keras calls this in each replica with gradients that are summed and clipped."""
        variables = [variable for _, variable in grads_and_vars]
        # An embedding's is sparse. One of another dtype would make the kernel abort the process.
        gradients = [tf.convert_to_tensor(g, v.dtype) for g, v in grads_and_vars]
        ratios = self.trust_ratios(gradients, variables)
        # Each ratio goes with its gradient to where the variable is updated.
        pairs = list(zip(gradients, ratios))
        return super()._internal_apply_gradients(list(zip(pairs, variables)))

    def update_step(self, gradient: tuple[tf.Tensor, tf.Tensor], variable: tf.Variable) -> None:
        """Applies one gradient, which comes with its trust ratio, to its variable."""
        own, ratio = gradient
        index = self._index(variable)
        rate = tf.cast(self._rate_of(index), ratio.dtype)
        if self.rate_in_momentum:
            rate *= ratio
            own = self._add_decay(own, variable, index, buffer_scale=-rate)
        else:
            own = self._add_decay(own, variable, index, buffer_scale=None)
            own *= tf.cast(ratio, own.dtype)
        self._move(own, variable, index, rate)

    def _by_variable(self) -> dict[str, list[Any] | None]:
        return {**super()._by_variable(), "trust_mask": self.trust_mask}

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        config = super().get_config()
        config.update(eeta=self.eeta, epsilon=self.epsilon)
        return config


def _norms(tensors: Sequence[tf.Tensor | tf.Variable], dtype: tf.DType) -> tf.Tensor:
    """Returns the L2 norm of each tensor, [tensors]."""
    halves = [tf.nn.l2_loss(tf.cast(tensor, dtype)) for tensor in tensors]
    return tf.sqrt(2 * tf.stack(halves))
