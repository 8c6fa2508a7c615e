"""Exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.optimizers.shadow_weights import ShadowWeights


class WeightAverage(ShadowWeights):
    """Exponential moving average: ``average = decay * average + (1 - decay) * value`` each step.

    It starts at the initial values, as in Page 2019, and includes the moving averages of batch
    norm, which belong to the averaged weights. ``every`` above 1 makes it cheaper: it averages the
    values of every few steps, with ``decay ** every``, in Page 2019 .99 ** 5.

    Args:
      variables: of the model; those of integer dtypes are left out.
      decay: decay factor of the average per step, in [0, 1).
      every: steps between updates.

    Attributes:
      averages: of the variables, in their order.

    Raises:
      UserError: if ``decay`` or ``every`` is out of range.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float, every: int = 1) -> None:
        super().__init__(variables, decay, every)

    def update(self, step: tf.Tensor | int = 0) -> None:
        """Updates the average if an update is due; call it in a replica, after a step.

        Updates are due at multiples of ``every``. Page 2019 restarts counting at 0 in each epoch.
        """
        if self._every == 1:
            self._follow(self._keep)
            return
        due = tf.equal(tf.cast(step, tf.int64) % self._every, 0)
        tf.cond(due, lambda: self._follow(self._keep), lambda: None)
