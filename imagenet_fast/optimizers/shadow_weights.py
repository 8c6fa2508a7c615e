"""Copies of a model's weights that follow them slowly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.one_call import assign_own, one_call, own_values


class ShadowWeights:
    """What a moving average of weights and lookahead share: a copy of each variable.

    To be made in the strategy's scope; the copies begin at the variables' values. Not a
    ``tf.Module``, since Keras would take its variables for some of the model's weights.

    Args:
      variables: of the model; those that are not floating-point numbers have no copy.
      decay: share of a copy that a step keeps, in [0, 1).
      every: steps from one update to the next; it keeps ``decay ** every``.

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
        self._variables = [v for v in variables if v.dtype.is_floating]
        self._every = every
        self._keep = decay**every
        self._used = False
        # Each replica keeps its own copy: an update needs no communication.
        self.averages = [
            _copy(variable, f"average_{index}") for index, variable in enumerate(self._variables)
        ]
        strategy = tf.distribute.get_strategy()
        self._restart = one_call(strategy, self._restart_own)
        self._swap = one_call(strategy, self._swap_own)

    def restart(self) -> None:
        """Begins anew at the present values; outside of replicas."""
        self._restart()

    def _restart_own(self) -> None:
        assign_own(self.averages, own_values(self._variables))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The variables hold the copies inside, and afterwards, to the bit, what they held.

        Outside of functions and replicas. Values change places: no arithmetic. Once inside,
        being inside again changes nothing.
        """
        if self._used:
            yield
            return
        self._swap()
        self._used = True
        try:
            yield
        finally:
            self._swap()
            self._used = False

    def _swap_own(self) -> None:
        values, averages = own_values(self._variables), own_values(self.averages)
        assign_own(self._variables, averages)
        assign_own(self.averages, values)

    def _follow(self, keep: tf.Tensor | float) -> None:
        """Makes each copy ``keep * copy + (1 - keep) * value``; in a replica."""
        for average, variable in zip(self.averages, self._variables):
            value, own = variable.read_value(), average.read_value()
            change = tf.cast(1 - keep, value.dtype) * (value - own)
            average.assign_add(tf.cast(change, average.dtype))


def _copy(variable: tf.Variable, name: str) -> tf.Variable:
    with tf.device(variable.device):  # in a pipeline, that of a stage
        return tf.Variable(
            variable,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name=name,
        )
