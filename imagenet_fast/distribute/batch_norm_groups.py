"""Whose images batch norm takes its statistics over: several replicas', or a part of one's."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError


def batch_norm_group_size(batch_norm_batch_size: int, per_replica: int, replicas: int) -> int:
    """Returns the number of neighbouring replicas whose images make ``batch_norm_batch_size``.

    Rounded down, as in Google's EfficientNet; at least one replica, at most all of them.

    Args:
      batch_norm_batch_size: images over which statistics are taken; 0: each replica alone.
      per_replica: images that each replica normalizes at once.
      replicas: in the whole job.

    Raises:
      UserError: if the replicas cannot be split into such groups.
    """
    size = min(max(1, batch_norm_batch_size // per_replica), replicas)
    if replicas % size == 0:
        return size
    lower, upper = _divisors_around(size, replicas)
    raise UserError(
        f"batch_norm_batch_size {batch_norm_batch_size} takes groups of {size} replicas with "
        f"{per_replica} images each, into which {replicas} replicas cannot be split; "
        f"try {lower * per_replica} or {upper * per_replica}"
    )


def ghost_batch_size(batch_norm_batch_size: int, per_replica: int) -> int:
    """Returns the part of a replica's images that have statistics of their own; 0: all of them.

    Args:
      batch_norm_batch_size: images over which statistics are taken; 0: each replica's.
      per_replica: images that each replica normalizes at once.

    Raises:
      UserError: if these cannot be split into such parts.
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
    """Returns the images whose statistics are taken together, which may be fewer than asked for.

    Args:
      batch_norm_batch_size: as :func:`batch_norm_group_size` takes it.
      per_replica: images that each replica normalizes at once.
      replicas: in the whole job.

    Raises:
      UserError: as the other functions.
    """
    if not batch_norm_batch_size:
        return per_replica
    part = ghost_batch_size(batch_norm_batch_size, per_replica)
    group = batch_norm_group_size(batch_norm_batch_size, per_replica, replicas)
    return part or group * per_replica


def _divisors_around(number: int, whole: int) -> tuple[int, int]:
    """Returns the next smaller and the next larger divisor of ``whole``, which has both."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    return max(n for n in divisors if n < number), min(n for n in divisors if n > number)
