"""Muon: orthogonalized momentum for the filters of convolutions, SGD for all other variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of, ops
from imagenet_fast.optimizers.schedules import Schedule, Tensor
from imagenet_fast.optimizers.sgd import SGD, as_list

# Of the odd polynomial of degree 5 that each iteration applies to all singular values: steep at 0,
# it keeps values near 1 between 0.68 and 1.21.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


@keras.saving.register_keras_serializable("imagenet_fast")
class Muon(SGD):
    """SGD that orthogonalizes the updates of filters: all their singular values are about 1.

    Jordan 2024, as in his airbench for CIFAR-10. With filters as matrices, one row for each output
    channel::

        u = filter_momentum * u + gradient
        w = sqrt(rows) / |w| * w
        w = w - learning_rate * orthogonalize(u)     (Nesterov: of gradient + filter_momentum * u)

    The norm of the gradient has no effect, and there is no weight decay: each step resets a
    filter's norm, or only some steps do, as ``norm_every`` says. SGD updates all other variables.

    Args:
      momentum: decay factor of the momentum buffer, in [0, 1), of all but filters.
      nesterov: whether to use Nesterov momentum, also for filters.
      filter_mask: for each trainable variable in order, whether it is a filter, with the output
        channels in its last dimension; None: variables of rank 4, as the kernels of convolutions.
        Depthwise kernels are no filters and need a mask.
      filter_momentum: decay factor of a filter's momentum buffer, in [0, 1).
      newton_schulz_steps: ``steps`` of ``orthogonalize``.
      newton_schulz_dtype: ``dtype`` of ``orthogonalize``.
      coefficients: ``coefficients`` of ``orthogonalize``.
      norm_every: steps between resets of the norm of filters, from the first reset, that of step
        ``norm_every``, on: one number, or the first and the last, between which they grow linearly,
        rounded down, with the step.
      total_steps: of the run, needed for two numbers.
      **kwargs: further options of ``SGD``. ``rate_factors`` apply to filters, too; weight decay
        does not.

    Raises:
      UserError: if ``momentum``, ``filter_momentum``, ``newton_schulz_steps`` or ``norm_every`` is
        out of range.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.24,
        momentum: float = 0.85,
        nesterov: bool = True,
        filter_mask: Sequence[bool] | None = None,
        filter_momentum: float = 0.6,
        newton_schulz_steps: int = 3,
        newton_schulz_dtype: str = "bfloat16",
        coefficients: Sequence[float] = COEFFICIENTS,
        norm_every: Sequence[int] = (1,),
        total_steps: int | None = None,
        name: str = "Muon",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov, name=name, **kwargs)
        if not 0 <= filter_momentum < 1:
            raise UserError(
                f"filter_momentum is {filter_momentum}, but must be at least 0 and below 1"
            )
        if newton_schulz_steps < 1:
            raise UserError(f"newton_schulz_steps is {newton_schulz_steps}, but must be positive")
        self.coefficients = [float(value) for value in coefficients]
        self.norm_every = [int(steps) for steps in norm_every]
        self.total_steps = total_steps
        self._resets = resets_of_norm(self.norm_every, total_steps)
        self.filter_mask = as_list(filter_mask, bool)
        self.filter_momentum = filter_momentum
        self.newton_schulz_steps = newton_schulz_steps
        self.newton_schulz_dtype = newton_schulz_dtype

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Applies one gradient to its variable."""
        index = self._index(variable)
        if not self._is_filter(index, variable):
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = ops.cast(ops.convert_to_tensor(gradient), variable.dtype)
        buffer, shape, dtype = self.momentums[index], tuple(variable.shape), gradient.dtype
        momentum = ops.convert_to_tensor(self.filter_momentum, dtype)
        direction = momentum * buffer + gradient
        self.assign(buffer, direction)
        if self.nesterov:
            direction = gradient + momentum * direction
        # Keras has the output channels in the columns. Orthogonalizing commutes with transposing.
        matrix = ops.reshape(direction, [-1, shape[-1]])
        step = orthogonalize(
            matrix, self.newton_schulz_steps, self.newton_schulz_dtype, self.coefficients
        )
        norm = _norm(ops.convert_to_tensor(variable))
        zero, one, full = (ops.convert_to_tensor(x, dtype) for x in (0.0, 1.0, shape[-1] ** 0.5))
        scale = ops.where(norm > 0, full / norm, zero)
        if not all(self._resets):
            scale = ops.where(self._resets_norm(), scale, one)
        rate = ops.cast(self._rate_of(index, learning_rate), dtype)
        self.assign(variable, scale * variable - rate * ops.reshape(step, shape))

    def _resets_norm(self) -> Tensor:
        """Returns whether this step resets the norm of filters, a bool scalar."""
        # An optimizer that goes on beyond its steps repeats them.
        place = ops.cast(self.iterations, "int32") % len(self._resets)
        return ops.take(ops.convert_to_tensor(self._resets), place)

    def _is_filter(self, index: int, variable: Any) -> bool:
        if self.filter_mask is None:
            return len(variable.shape) == 4
        return bool(self.filter_mask[index])

    def _check(self, variables: Sequence[Any]) -> None:
        super()._check(variables)
        for index, variable in enumerate(variables):
            if self._is_filter(index, variable) and len(variable.shape) < 2:
                raise UserError(
                    f"filter_mask has entry {index} for {name_of(variable)}, of shape "
                    f"{tuple(variable.shape)}, which is no matrix: set it to False"
                )

    def _by_variable(self) -> dict[str, list[Any] | None]:
        return {**super()._by_variable(), "filter_mask": self.filter_mask}

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        config = super().get_config()
        config.update(
            filter_momentum=self.filter_momentum,
            newton_schulz_steps=self.newton_schulz_steps,
            newton_schulz_dtype=self.newton_schulz_dtype,
            coefficients=self.coefficients,
            norm_every=self.norm_every,
            total_steps=self.total_steps,
        )
        return config


def resets_of_norm(every: Sequence[int], total_steps: int | None) -> list[bool]:
    """Returns for each step of a run, or of a period that repeats, whether it resets norms.

    Args:
      every: steps between resets, as ``norm_every`` of ``Muon``.
      total_steps: of the run; None: unknown.

    Raises:
      UserError: if there are no or too many numbers, one is not positive, or two lack the steps.
    """
    if len(every) not in (1, 2) or min(every) < 1:
        raise UserError(f"norm_every is {list(every)}, but must be one or two positive numbers")
    first, last = every[0], every[-1]
    if first == last:
        return [False] * (first - 1) + [True]
    if not total_steps:
        raise UserError(f"norm_every is {list(every)}: two numbers need total_steps, of the run")
    resets, latest = [], 0
    for step in range(1, total_steps + 1):
        resets.append(step - latest >= first + int((last - first) * step / total_steps))
        latest = step if resets[-1] else latest
    return resets


def orthogonalize(
    matrix: Tensor,
    steps: int = 3,
    dtype: str = "bfloat16",
    coefficients: Sequence[float] = COEFFICIENTS,
) -> Tensor:
    """Returns a matrix with the same singular vectors, and singular values of about 1.

    Newton-Schulz iteration with Jordan's coefficients does not converge, but brings singular values
    between 0.68 and 1.21 in a few steps. Small ones take longest: each step multiplies them by
    the first coefficient, from their fraction of the matrix's norm.

    Args:
      matrix: float [rows, columns].
      steps: number of iterations.
      dtype: of matrix products. All else has the dtype of ``matrix``: rounded coefficients do more
        harm than rounded products.
      coefficients: of x, x^3 and x^5 in the polynomial of singular values; by default Jordan's.

    Returns:
      A matrix of the shape and dtype of ``matrix``.
    """
    a, b, c = coefficients
    # No singular value is above the norm.
    x = matrix / (_norm(matrix) + _EPSILON)
    tall = matrix.shape[0] > matrix.shape[1]

    def product(left: Tensor, right: Tensor) -> Tensor:
        return ops.cast(ops.matmul(ops.cast(left, dtype), ops.cast(right, dtype)), matrix.dtype)

    for _ in range(steps):
        # The smaller Gram matrix; the polynomial is the same on either side.
        gram = product(ops.transpose(x), x) if tall else product(x, ops.transpose(x))
        factor = b * gram + c * product(gram, gram)
        x = a * x + (product(x, factor) if tall else product(factor, x))
    return x


def _norm(tensor: Tensor) -> Tensor:
    return ops.sqrt(ops.sum(ops.square(tensor)))
