"""Keras optimizers that sum gradients as :class:`~imagenet_fast.distribute.all_reduce.AllReduce`.

For models of one's own under ``model.fit``; ``Classifier`` does it itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.all_reduce import AllReduce

GradientsAndVariables = list[tuple[tf.Tensor, tf.Variable]]


class AllReduceMixin:
    """Gives a Keras optimizer another gradient all-reduce.

    It is what ``apply_gradients`` begins with, so that clipping, decay and the update itself work
    on sums as before, in a ``LossScaleOptimizer``, too.

    The optimizer's configuration leaves it out: it belongs to the cluster and not to the model,
    which may be loaded elsewhere. There it sums as Keras does, until ``all_reduce`` is set.

    Args:
      *args: as the optimizer takes them.
      all_reduce: how to sum; None: as Keras does.
      **kwargs: as the optimizer takes them.

    Attributes:
      all_reduce: how gradients are summed.
    """

    def __init__(self, *args: Any, all_reduce: AllReduce | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all_reduce = all_reduce

    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor | None, tf.Variable]]
    ) -> GradientsAndVariables:
        """Returns the variables that have a gradient, with its sum over all replicas."""
        pairs = [(gradient, own) for gradient, own in grads_and_vars if gradient is not None]
        if self.all_reduce is None:
            return super().aggregate_gradients(pairs)  # type: ignore[misc]  # The optimizer's.
        gradients, variables = zip(*pairs) if pairs else ((), ())
        return list(zip(self.all_reduce(gradients, variables=variables), variables))


@functools.cache
def with_all_reduce(optimizer: type[keras.optimizers.Optimizer]) -> type:
    """Returns the optimizer's class with :class:`AllReduceMixin`, the same one each time.

    For example ``with_all_reduce(keras.optimizers.Adam)(1e-3, all_reduce=AllReduce())``. Keras can
    load a model saved with it after this function was called for the same optimizer.

    Raises:
      UserError: if it is not one of Keras' optimizers, or a legacy one.
    """
    if not hasattr(optimizer, "aggregate_gradients"):
        raise UserError(
            f"with_all_reduce needs the class of a Keras optimizer, as keras.optimizers.SGD; "
            f"{getattr(optimizer, '__name__', optimizer)!r} has no aggregate_gradients"
        )
    name = f"AllReduce{optimizer.__name__}"
    made = type(name, (AllReduceMixin, optimizer), {"__doc__": optimizer.__doc__})
    return keras.saving.register_keras_serializable("imagenet_fast", name)(made)
