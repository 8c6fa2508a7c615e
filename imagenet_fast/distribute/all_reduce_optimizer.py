"""Keras optimizers with :class:`~imagenet_fast.distribute.all_reduce.AllReduce`.

For other Keras models under ``model.fit``; ``Classifier`` has a gradient all-reduce of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.sums_first import SumsFirst


class AllReduceMixin(SumsFirst):
    """Replaces the gradient all-reduce of a Keras optimizer.

    An update begins with the all-reduce, so clipping, decay and the update work on its results,
    also in a ``LossScaleOptimizer``.

    The optimizer's configuration does not include it, because it depends on the cluster. A loaded
    model uses TensorFlow's own all-reduce until ``all_reduce`` is set.

    Args:
      *args: the optimizer's arguments.
      all_reduce: the all-reduce, an attribute; None: TensorFlow's own.
      **kwargs: the optimizer's keyword arguments.
    """

    def __init__(self, *args: Any, all_reduce: AllReduce | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all_reduce = all_reduce

    def sum_over_replicas(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients summed over the replicas, see the base class."""
        if self.all_reduce is None or not gradients:
            return super().sum_over_replicas(gradients, variables)
        return list(self.all_reduce(gradients, variables=tensorflow_variables(variables)))

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        """With Keras 2, which begins with it: the sums, without missing gradients."""
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        gradients, variables = zip(*pairs) if pairs else ((), ())
        return list(zip(self.sum_over_replicas(list(gradients), variables), variables))


@functools.cache
def with_all_reduce(optimizer: type[keras.optimizers.Optimizer]) -> type:
    """Returns a subclass of the optimizer with :class:`AllReduceMixin`; cached.

    For example ``with_all_reduce(keras.optimizers.Adam)(1e-3, all_reduce=AllReduce())``. Before
    Keras can load a model saved with it, call this function for the same optimizer.

    Raises:
      UserError: if the class is not a Keras optimizer.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer)):
        raise UserError(
            "with_all_reduce needs a Keras optimizer class, such as keras.optimizers.SGD, and "
            f"{getattr(optimizer, '__name__', optimizer)!r} is none"
        )
    name = f"AllReduce{optimizer.__name__}"
    made = type(name, (AllReduceMixin, optimizer), {"__doc__": optimizer.__doc__})
    return keras.saving.register_keras_serializable("imagenet_fast", name)(made)
