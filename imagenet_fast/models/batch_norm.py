"""The batch norm of all models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tf_keras as keras

from imagenet_fast.layers import GroupedBatchNormalization


def batch_norm(
    momentum: float, epsilon: float, group_size: int
) -> Callable[..., keras.layers.BatchNormalization]:
    """Returns what makes a model's batch norms, from their names and further options of Keras'.

    Args:
        momentum: share of the old value in each update of the moving averages.
        epsilon: added to the variance.
        group_size: neighbouring replicas that take the statistics together.
    """
    if group_size == 1:
        layer = keras.layers.BatchNormalization
    else:
        layer = functools.partial(GroupedBatchNormalization, group_size=group_size)
    return functools.partial(layer, momentum=momentum, epsilon=epsilon)
