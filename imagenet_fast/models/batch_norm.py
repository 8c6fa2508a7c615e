"""The batch norm of all models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import GhostBatchNormalization, GroupedBatchNormalization


def batch_norm(
    momentum: float,
    epsilon: float,
    group_size: int,
    *,
    ghost_batch_size: int = 0,
    scale: bool = True,
) -> Callable[..., keras.layers.BatchNormalization]:
    """Returns what makes a model's batch norms, from their names and further options of Keras'.

    Args:
        momentum: fraction of the old value in each update of the moving averages.
        epsilon: added to the variance.
        group_size: neighbouring replicas that take the statistics together.
        ghost_batch_size: images of a replica that take the statistics together; 0: all.
        scale: have a gamma; otherwise it is 1.

    Raises:
        UserError: if statistics are to be taken over several replicas and over parts of one.
    """
    if ghost_batch_size and group_size != 1:
        raise UserError(
            f"ghost_batch_size={ghost_batch_size} splits the images of a replica, but batch norm "
            f"is to take those of {group_size} replicas together; leave out one of the two"
        )
    if ghost_batch_size:
        layer = functools.partial(GhostBatchNormalization, ghost_batch_size=ghost_batch_size)
    elif group_size != 1:
        layer = functools.partial(GroupedBatchNormalization, group_size=group_size)
    else:
        layer = keras.layers.BatchNormalization
    return functools.partial(layer, momentum=momentum, epsilon=epsilon, scale=scale)
