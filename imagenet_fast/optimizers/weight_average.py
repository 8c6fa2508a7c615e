"""Exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf


class WeightAverage:
    """Keeps ``average = decay * average + (1 - decay) * value`` of variables, by the step.

    It begins at the initial values, as Page 2019 has it, and takes in the moving averages of batch
    norm, with which the averaged weights belong together. To be made in the strategy's scope. Not
    a ``tf.Module``, since Keras would take its variables for some of the model's weights.

    Args:
      variables: of the model; those that are not floating-point numbers have no average.
      decay: share of the average that a step keeps, in [0, 1).
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float) -> None:
        self._variables = [v for v in variables if v.dtype.is_floating]
        self._decay = decay
        # Each replica keeps its own copy: an update needs no communication.
        self.averages = [
            tf.Variable(
                variable,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                name=f"average_{index}",
            )
            for index, variable in enumerate(self._variables)
        ]

    def update(self) -> None:
        """Takes in the present values; in a replica, after a step."""
        for average, variable in zip(self.averages, self._variables):
            change = (1 - self._decay) * (variable.read_value() - average.read_value())
            average.assign_add(tf.cast(change, average.dtype))

    def restart(self) -> None:
        """Begins anew at the present values; outside of replicas."""
        for average, variable in zip(self.averages, self._variables):
            for own, value in zip(_copies(average), _copies(variable)):
                own.assign(value.read_value())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The variables hold the averages inside, and afterwards, to the bit, what they held.

        Outside of functions and replicas. Values change places, copy by copy: no arithmetic.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, variable in zip(self.averages, self._variables):
            for one, other in zip(_copies(average), _copies(variable)):
                value = one.read_value()
                one.assign(other.read_value())
                other.assign(value)


def _copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns this process' copies of a variable: one on each device."""
    return tuple(getattr(variable, "values", (variable,)))
