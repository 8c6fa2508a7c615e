"""Lookahead: weights that are pulled back to slow copies of themselves."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.one_call import assign_own, own_values
from imagenet_fast.optimizers.shadow_weights import ShadowWeights


class Lookahead(ShadowWeights):
    """Lets slow copies follow the variables, and puts them into the variables, each few steps.

    Zhang et al. 2019, with the schedule of Jordan's airbench: after step ``t`` of ``total_steps``,
    where ``t`` is a multiple of ``every``::

        keep = decay ** every * (t / total_steps) ** 3
        slow = keep * slow + (1 - keep) * fast
        fast = slow

    so that the pull is weak at first and strong in the end. After the last step the variables
    become the slow copies, whether or not ``every`` divides ``total_steps``. The moving averages of
    batch norm are pulled, too.

    To be made in the strategy's scope. Not a ``tf.Module``, since Keras would take its variables
    for some of the model's weights.

    Args:
      variables: of the model; those that are not floating-point numbers are left alone.
      decay: share of the slow copies that a step at the end keeps, in [0, 1).
      every: steps from one update to the next.
      total_steps: of the training; from there on the pull is as strong as there.

    Attributes:
      averages: the slow copies, in the order of the variables.

    Raises:
      UserError: if ``decay``, ``every`` or ``total_steps`` is out of range.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], decay: float, every: int, total_steps: int
    ) -> None:
        if total_steps < 1:
            raise UserError(f"total_steps is {total_steps}, but must be positive")
        super().__init__(variables, decay, every)
        self._total_steps = total_steps

    def update(self, step: tf.Tensor | int) -> None:
        """Pulls the variables back, if it is the step for it; in a replica, after the step.

        Args:
          step: how many steps have been taken, this one included: the optimizer's ``iterations``.
        """
        step = tf.cast(step, tf.int64)
        regular = tf.equal(step % self._every, 0)
        progress = tf.cast(tf.minimum(step, self._total_steps), tf.float32) / self._total_steps
        keep = tf.where(regular, self._keep * progress**3, 1.0)
        due = regular | tf.equal(step, self._total_steps)
        tf.cond(due, lambda: self._pull(keep), lambda: None)

    def _pull(self, keep: tf.Tensor) -> None:
        self._follow(keep)
        assign_own(self._variables, own_values(self.averages))
