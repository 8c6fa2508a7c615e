"""Keras optimizers with :class:`~imagenet_fast.distribute.all_reduce.AllReduce`.

For other Keras models under ``model.fit``; ``Classifier`` has a gradient all-reduce of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.all_reduce import AllReduce

GradientsAndVariables = list[tuple[tf.Tensor, tf.Variable]]


class AllReduceMixin:
    """Replaces the gradient all-reduce of a Keras optimizer.

    ``apply_gradients`` begins with the all-reduce, so clipping, decay and the update work on its
    results as before, also in a ``LossScaleOptimizer``.

    The optimizer's configuration does not include it, because it depends on the cluster. A loaded
    model uses Keras' own all-reduce until ``all_reduce`` is set.

    Args:
      *args: the optimizer's arguments.
      all_reduce: the all-reduce; None: Keras' own.
      **kwargs: the optimizer's keyword arguments.

    Attributes:
      all_reduce: the all-reduce; None: Keras' own.
    """

    def __init__(self, *args: Any, all_reduce: AllReduce | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all_reduce = all_reduce

    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor | None, tf.Variable]]
    ) -> GradientsAndVariables:
        """Returns the all-reduced gradients with their variables, without missing gradients."""
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        if self.all_reduce is None:
            return super().aggregate_gradients(pairs)  # type: ignore[misc]  # The optimizer's.
        gradients, variables = zip(*pairs) if pairs else ((), ())
        return list(zip(self.all_reduce(gradients, variables=variables), variables))


@functools.cache
def with_all_reduce(optimizer: type[keras.optimizers.Optimizer]) -> type:
    """Returns a subclass of the optimizer with :class:`AllReduceMixin`; cached.

    For example ``with_all_reduce(keras.optimizers.Adam)(1e-3, all_reduce=AllReduce())``. Before
    Keras can load a model saved with it, call this function for the same optimizer.

    Raises:
      UserError: if the class is not a Keras optimizer, or a legacy one.
    """
    if not hasattr(optimizer, "aggregate_gradients"):
        raise UserError(
            f"with_all_reduce needs a Keras optimizer class, such as keras.optimizers.SGD; "
            f"{getattr(optimizer, '__name__', optimizer)!r} has no aggregate_gradients"
        )
    name = f"AllReduce{optimizer.__name__}"
    made = type(name, (AllReduceMixin, optimizer), {"__doc__": optimizer.__doc__})
    return keras.saving.register_keras_serializable("imagenet_fast", name)(made)
