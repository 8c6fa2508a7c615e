"""How many replicas take the statistics of batch norm together."""

from __future__ import annotations

from imagenet_fast.errors import UserError


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
    sizes = [n for n in range(1, replicas + 1) if replicas % n == 0]
    lower = max(n for n in sizes if n < size)
    upper = min(n for n in sizes if n > size)
    raise UserError(
        f"batch_norm_batch_size {batch_norm_batch_size} takes groups of {size} replicas with "
        f"{per_replica} images each, into which {replicas} replicas cannot be split; "
        f"try {lower * per_replica} or {upper * per_replica}"
    )
