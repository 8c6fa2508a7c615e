"""Batch normalization of all models, and its options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypedDict

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import (
    BatchNormalization,
    GhostBatchNormalization,
    GroupedBatchNormalization,
)


class NormOptions(TypedDict, total=False):
    """The batch-norm options that all models take, as ``norm_arguments`` describes them."""

    batch_norm_momentum: float
    batch_norm_epsilon: float
    batch_norm_group_size: int
    replicas_together: int
    ghost_batch_size: int


def norm_arguments(
    *,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    batch_norm_group_size: int = 1,
    replicas_together: int = 1,
    ghost_batch_size: int = 0,
) -> dict[str, Any]:
    """Returns the arguments of ``batch_norm`` for the options that all models have.

    Args:
        batch_norm_momentum: decay factor of the moving averages.
        batch_norm_epsilon: added to the variance.
        batch_norm_group_size: number of neighbouring replicas with common statistics.
        replicas_together: logical replicas of which each of these computes the images at once.
        ghost_batch_size: images of a replica with common statistics; 0: all.
    """
    return {
        "momentum": batch_norm_momentum,
        "epsilon": batch_norm_epsilon,
        "group_size": batch_norm_group_size,
        "replicas_together": replicas_together,
        "ghost_batch_size": ghost_batch_size,
    }


def batch_norm(
    momentum: float,
    epsilon: float,
    group_size: int,
    ghost_batch_size: int,
    *,
    replicas_together: int = 1,
    scale: bool = True,
) -> Callable[..., keras.layers.BatchNormalization]:
    """Returns what makes a model's batch norms, from their names and further options of Keras'.

    Args:
        momentum: decay factor of the moving averages.
        epsilon: added to the variance.
        group_size: number of neighbouring replicas with common statistics.
        ghost_batch_size: images of a replica with common statistics; 0: all.
        replicas_together: as of :func:`norm_arguments`.
        scale: whether to train gamma; otherwise it is 1.

    Raises:
        UserError: if statistics are to be common to several replicas and to parts of one.
    """
    layer = replacing_batch_norm(
        batch_norm_group_size=group_size,
        replicas_together=replicas_together,
        ghost_batch_size=ghost_batch_size,
    )
    if layer is BatchNormalization:
        layer = functools.partial(layer, unbiased_variance=True)
    return functools.partial(layer, momentum=momentum, epsilon=epsilon, scale=scale)


def replacing_batch_norm(
    *, batch_norm_group_size: int = 1, replicas_together: int = 1, ghost_batch_size: int = 0
) -> Callable[..., keras.layers.BatchNormalization]:
    """Returns what makes batch norms of a model of the user, from the arguments of Keras' ones.

    Args:
        batch_norm_group_size: number of neighbouring replicas with common statistics.
        replicas_together: as of :func:`norm_arguments`.
        ghost_batch_size: images of a replica with common statistics; 0: all.

    Raises:
        UserError: as :func:`batch_norm`.
    """
    if ghost_batch_size and batch_norm_group_size != 1:
        raise UserError(
            f"ghost_batch_size={ghost_batch_size} splits the images of a replica, but batch norm "
            f"is to take those of {batch_norm_group_size} replicas together; leave out one of the "
            "two"
        )
    if ghost_batch_size:
        return functools.partial(GhostBatchNormalization, ghost_batch_size=ghost_batch_size)
    # Also for a group on one device: other devices may carry a part each when the run resumes, and
    # the moving averages are to have the same variances.
    if batch_norm_group_size != 1 or replicas_together != 1:
        return functools.partial(GroupedBatchNormalization, group_size=batch_norm_group_size)
    return BatchNormalization
