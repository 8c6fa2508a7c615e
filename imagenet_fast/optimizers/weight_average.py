"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.optimizers.shadow_weights import ShadowWeights


class WeightAverage(ShadowWeights):
    """Keeps ``average = decay * average + (1 - decay) * value`` of variables, by the step.

    It begins at the initial values, as Page 2019 has it, and takes in the moving averages of batch
    norm, with which the averaged weights belong together. With ``every`` above 1 it takes in the
    values of some steps alone, which is cheaper, and keeps ``decay ** every``: Page has .99 ** 5.

    To be made in the strategy's scope. Not a ``tf.Module``, since Keras would take its variables
    for some of the model's weights.

    Args:
      variables: of the model; those that are not floating-point numbers have no average.
      decay: share of the average that a step keeps, in [0, 1).
      every: steps from one update to the next.

    Attributes:
      averages: of the variables, in their order.

    Raises:
      UserError: if ``decay`` or ``every`` is out of range.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float, every: int = 1) -> None:
        super().__init__(variables, decay, every)

    def update(self, step: tf.Tensor | int = 0) -> None:
        """Takes in the present values, if it is the step for it; in a replica, after the step.

        Args:
          step: a whole number; the average is updated at 0 and each ``every`` steps on. Page counts
            anew from 0 in each epoch.
        """
        if self._every == 1:
            self._follow(self._keep)
            return
        due = tf.equal(tf.cast(step, tf.int64) % self._every, 0)
        tf.cond(due, lambda: self._follow(self._keep), lambda: None)
