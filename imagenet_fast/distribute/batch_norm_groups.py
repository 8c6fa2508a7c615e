"""Batch-norm groups: statistics over several replicas' images, or over part of one replica's.

Statistics are computed over ``batch_norm_batch_size`` images; 0: each replica's. ``per_replica``
are the images that each replica normalizes at once.
"""

from __future__ import annotations

from imagenet_fast.base.errors import UserError


def batch_norm_group_size(batch_norm_batch_size: int, per_replica: int, replicas: int) -> int:
    """Returns the number of consecutive replicas that share batch-norm statistics.

    The quotient ``batch_norm_batch_size / per_replica`` rounded down, as in Google's EfficientNet;
    at least one replica, at most all.

    Args:
      batch_norm_batch_size: images over which statistics are computed; 0: each replica's.
      per_replica: images that each replica normalizes at once.
      replicas: number of replicas.

    Raises:
      UserError: if the replicas cannot be split into such groups.
    """
    size = min(max(1, batch_norm_batch_size // per_replica), replicas)
    if replicas % size == 0:
        return size
    lower, upper = _divisors_around(size, replicas)
    raise UserError(
        f"batch_norm_batch_size {batch_norm_batch_size} needs groups of {size} replicas with "
        f"{per_replica} images each, into which {replicas} replicas cannot be split; "
        f"try {lower * per_replica} or {upper * per_replica}"
    )


def ghost_batch_size(batch_norm_batch_size: int, per_replica: int) -> int:
    """Returns the ghost batch size: images per part of a replica's batch; 0: the batch is whole.

    Raises:
      UserError: if the images cannot be split into such parts.
    """
    if not 0 < batch_norm_batch_size < per_replica:
        return 0
    if per_replica % batch_norm_batch_size == 0:
        return batch_norm_batch_size
    lower, upper = _divisors_around(batch_norm_batch_size, per_replica)
    raise UserError(
        f"batch_norm_batch_size {batch_norm_batch_size} does not divide the {per_replica} images "
        f"that each replica normalizes at once; try {lower} or {upper}"
    )


def images_together(batch_norm_batch_size: int, per_replica: int, replicas: int) -> int:
    """Returns the number of images that share statistics, which may be fewer than requested.

    Errors are those of the other functions.
    """
    part = ghost_batch_size(batch_norm_batch_size, per_replica)
    group = batch_norm_group_size(batch_norm_batch_size, per_replica, replicas)
    return part or group * per_replica


def _divisors_around(number: int, whole: int) -> tuple[int, int]:
    """Returns the closest divisors of ``whole`` below and above ``number``; both must exist."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    return max(n for n in divisors if n < number), min(n for n in divisors if n > number)
