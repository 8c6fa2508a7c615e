"""Lookahead: periodic interpolation of the weights towards slow weights."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.one_call import assign_local, local_values
from imagenet_fast.optimizers.shadow_weights import ShadowWeights


class Lookahead(ShadowWeights):
    """Slow weights that follow the model's, and replace them every few steps.

    Zhang et al. 2019, with the schedule of Jordan's airbench: after step ``t`` of ``total_steps``,
    if ``t`` is a multiple of ``every``::

        keep = decay ** every * (t / total_steps) ** 3
        slow = keep * slow + (1 - keep) * fast
        fast = slow

    so the pull towards the slow weights grows during training. After the last step the model gets
    the slow weights, as in airbench: if ``every`` does not divide ``total_steps``, the steps after
    the last multiple are discarded. This includes the moving averages of batch norm.

    Args:
      variables: of the model; those of integer dtypes are left out.
      decay: decay factor of the slow weights per step at the end of training, in [0, 1).
      every: steps between updates.
      total_steps: of the training; ``keep`` stays constant from there on.

    Attributes:
      averages: slow weights, in the order of the variables.

    Raises:
      UserError: if ``decay``, ``every`` or ``total_steps`` is out of range, or all steps would be
        discarded.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], decay: float, every: int, total_steps: int
    ) -> None:
        if total_steps < 1:
            raise UserError(f"total_steps is {total_steps}, but must be positive")
        if every > total_steps:
            raise UserError(
                f"lookahead every {every} steps would discard all {total_steps} steps of the run, "
                f"because no multiple of {every} is reached"
            )
        super().__init__(variables, decay, every)
        self._total_steps = total_steps

    def update(self, step: tf.Tensor | int) -> None:
        """Interpolates the weights if an update is due; call it in a replica, after a step.

        ``step`` is the number of steps including this one: the optimizer's ``iterations``.
        """
        step = tf.cast(step, tf.int64)
        regular = tf.equal(step % self._every, 0)
        progress = tf.cast(tf.minimum(step, self._total_steps), tf.float32) / self._total_steps
        keep = tf.where(regular, self._keep * progress**3, 1.0)
        due = regular | tf.equal(step, self._total_steps)
        tf.cond(due, lambda: self._pull(keep), lambda: None)

    def _pull(self, keep: tf.Tensor) -> None:
        self._follow(keep)
        assign_local(self._variables, local_values(self.averages))
