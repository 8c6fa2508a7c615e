"""LARS, layer-wise adaptive rate scaling, for batches of thousands of images."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import ops
from imagenet_fast.optimizers.schedules import Schedule, Tensor
from imagenet_fast.optimizers.sgd import SGD, as_list, dense


@keras.saving.register_keras_serializable("imagenet_fast")
class LARS(SGD):
    """SGD that scales the learning rate of each weight tensor by a ratio of norms.

    You, Gitman and Ginsburg 2017, in the form of Google's TPU and MLPerf code::

        trust = eeta * |w| / (|gradient| + weight_decay * |w| + epsilon)     (1 if a norm is 0)
        v = momentum * v + learning_rate * trust * (gradient + weight_decay * w)
        w = w - v              (Nesterov: w - momentum * v - learning_rate * trust * (...))

    ``rate_in_momentum=False`` puts the learning rate outside the momentum buffer, so a change of
    the learning rate also acts on past gradients::

        v = momentum * v + trust * (gradient + weight_decay * w)
        w = w - learning_rate * v

    Norms are float32, or float64 if a variable is: in float16 they would overflow or vanish.

    Arguments that are not here are those of ``SGD``.

    Args:
      weight_decay: L2 coefficient; None, as in Keras: 0. The recipes decay weights only: no biases,
        no gamma or beta of batch norm (``weight_decay_mask``).
      eeta: trust coefficient.
      epsilon: added to the norm of the gradient.
      rate_in_momentum: whether the momentum buffer accumulates updates (MLPerf's scaled momentum)
        rather than gradients.
      trust_mask: for each trainable variable in order, whether to scale its learning rate; None:
        all are scaled. The recipes scale weights only. ``variable_roles`` helps to make it.
      **kwargs: ``zero_rate_at``, as in ``SGD``, and Keras' options (``clipnorm``, ``use_ema``,
        ...).

    Raises:
      UserError: if ``momentum``, ``weight_decay``, ``eeta`` or ``epsilon`` is out of range.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.1,
        momentum: float = 0.9,
        weight_decay: float | None = 1e-4,
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
            weight_decay,
            rate_in_momentum,
            weight_decay_mask,
            rate_factors,
            name=name,
            **kwargs,
        )
        if self.decoupled_at_rate is not None:
            raise UserError(
                "LARS has weight decay in its trust ratios: leave out decoupled_at_rate"
            )
        if eeta <= 0:
            raise UserError(f"eeta is {eeta}, but must be positive")
        if epsilon < 0:
            raise UserError(f"epsilon is {epsilon}, but must not be negative")
        self.eeta = eeta
        self.epsilon = epsilon
        self.trust_mask = as_list(trust_mask, bool)

    def trust_ratios(self, gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[Tensor]:
        """Returns the trust ratio of each variable, the factor of its learning rate.

        Gradients are without weight decay.

        Returns:
          Scalars, float32, or float64 if a variable is; 1 for those that ``trust_mask`` excludes.
        """
        indices = [self._index(variable) for variable in variables]
        scaled = [self.trust_mask is None or self.trust_mask[index] for index in indices]
        # TensorFlow's dtype, or its name.
        wide = any("float64" in str(variable.dtype) for variable in variables)
        dtype = "float64" if wide else "float32"
        one = ops.convert_to_tensor(1.0, dtype)
        if not any(scaled):
            return [one for _ in variables]
        # One kernel for each norm, then the arithmetic of all on one vector.
        weight_norms = _norms(itertools.compress(variables, scaled), dtype)
        gradient_norms = _norms(itertools.compress(gradients, scaled), dtype)
        decays = [self._decay_of(index) for index in itertools.compress(indices, scaled)]
        denominators = gradient_norms + ops.convert_to_tensor(decays, dtype) * weight_norms
        if self.epsilon:
            denominators = denominators + ops.convert_to_tensor(self.epsilon, dtype)
        ratios = ops.where(
            ops.logical_and(weight_norms > 0, gradient_norms > 0),
            ops.convert_to_tensor(self.eeta, dtype) * weight_norms / denominators,
            one,
        )
        ratio = iter(ops.unstack(ratios, sum(scaled)))
        return [next(ratio) if is_scaled else one for is_scaled in scaled]

    def prepared(self, pairs: Iterable[tuple[Tensor, Any]]) -> list[tuple[Any, Any]]:
        """Returns what ``update_step`` takes: each summed, clipped gradient and its trust ratio."""
        pairs = [pair for pair in pairs if pair[0] is not None]
        variables = [variable for _, variable in pairs]
        gradients = [dense(gradient, variable.dtype) for gradient, variable in pairs]
        ratios = self.trust_ratios(gradients, variables)
        return list(zip(zip(gradients, ratios), variables))

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return self.prepared(super()._all_reduce_sum_gradients(grads_and_vars))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Tensor) -> None:
        """Applies one gradient, or a pair of one and its trust ratio, to its variable."""
        if not isinstance(gradient, tuple):  # of a backend that updates one after another
            ((gradient, _),) = self.prepared([(gradient, variable)])
        direction, ratio = gradient
        index = self._index(variable)
        rate = ops.cast(self._rate_of(index, learning_rate), ratio.dtype)
        if self.rate_in_momentum:
            rate = rate * ratio
            direction = self._add_decay(direction, variable, index, buffer_scale=-rate)
        else:
            direction = self._add_decay(direction, variable, index, buffer_scale=None)
            direction = direction * ops.cast(ratio, direction.dtype)
        self._apply(direction, variable, index, rate)

    def _by_variable(self) -> dict[str, list[Any] | None]:
        return {**super()._by_variable(), "trust_mask": self.trust_mask}

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "eeta": self.eeta, "epsilon": self.epsilon}


def _norms(tensors: Iterable[Any], dtype: str) -> Tensor:
    """Returns the L2 norm of each tensor, [tensors]."""
    return ops.sqrt(ops.stack([ops.sum(ops.square(ops.cast(tensor, dtype))) for tensor in tensors]))
