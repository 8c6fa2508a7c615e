"""Shadow weights, which follow a model's weights: base of EMA and lookahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.distribute.one_call import assign_local, local_values, local_variable, one_call


class ShadowWeights:
    """A copy of each variable, starting at its value: base of ``WeightAverage`` and ``Lookahead``.

    Must be made in the strategy's scope. It is not a ``tf.Module``, since Keras would count its
    variables among the model's weights.

    Args:
      variables: of the model; those of integer dtypes have no copy.
      decay: decay factor of the copies per step, in [0, 1).
      every: steps between updates, each with ``decay ** every``.

    Attributes:
      averages: the copies, in the order of the variables.

    Raises:
      UserError: if ``decay`` or ``every`` is out of range.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float, every: int) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay is {decay}, but must be at least 0 and below 1")
        if every < 1:
            raise UserError(f"every is {every}, but must be a positive number of steps")
        self._variables = [v for v in tensorflow_variables(variables) if v.dtype.is_floating]
        self._every = every
        self._keep = decay**every
        self._swapped = False
        # Each replica keeps its own copy: an update needs no communication.
        self.averages = [
            _copy(variable, f"average_{index}") for index, variable in enumerate(self._variables)
        ]
        strategy = tf.distribute.get_strategy()
        self._restart = one_call(strategy, self._restart_own)
        self._swap = one_call(strategy, self._swap_own)

    def restart(self) -> None:
        """Resets the copies to the current values; call it in cross-replica context."""
        self._restart()

    def _restart_own(self) -> None:
        assign_local(self.averages, local_values(self._variables))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Swaps the variables' values with the copies inside the context, and back afterwards.

        The values are swapped without arithmetic, so restored exactly. Nested contexts have no
        effect. Enter it in cross-replica context, outside of ``tf.function``.
        """
        if self._swapped:
            yield
            return
        self._swap()
        self._swapped = True
        try:
            yield
        finally:
            self._swap()
            self._swapped = False

    def _swap_own(self) -> None:
        values, averages = local_values(self._variables), local_values(self.averages)
        assign_local(self._variables, averages)
        assign_local(self.averages, values)

    def _follow(self, keep: tf.Tensor | float) -> None:
        """Makes each copy ``keep * copy + (1 - keep) * value``; in a replica."""
        for average, variable in zip(self.averages, self._variables):
            value = variable.read_value()
            change = tf.cast(1 - keep, value.dtype) * (value - average.read_value())
            average.assign_add(tf.cast(change, average.dtype))


def _copy(variable: tf.Variable, name: str) -> tf.Variable:
    with tf.device(variable.device):  # in a pipeline, its stage's
        return local_variable(variable, name)
