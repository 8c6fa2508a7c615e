"""The values that families of large-batch recipes use, by the batch, and those between them."""

from __future__ import annotations

import bisect
import dataclasses
import math

from imagenet_fast.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class BatchValues:
    """What a recipe for LARS sets by its batch.

    Attributes:
      learning_rate: after the warmup.
      warmup_epochs: length of the warmup, which begins at rate 0.
      momentum: share of the momentum that a step keeps.
      weight_decay: times the weights, added to their gradients.
    """

    learning_rate: float
    warmup_epochs: float
    momentum: float
    weight_decay: float


# Google's released TPU code for ResNet (tensorflow/tpu); LARS from batch 16384 on. MLPerf: the
# reference code's README (4096), Google's reference convergence points (8192, 65536) and
# Google's submissions to round 0.6 (16384, 32768).
BATCH_TABLES: dict[str, dict[int, BatchValues]] = {
    "google_tpu_pod": {
        16384: BatchValues(25.0, 5, 0.9, 1e-4),
        32768: BatchValues(32.0, 14, 0.9, 1e-4),
        65536: BatchValues(35.6, 40, 0.9, 1e-4),
    },
    "mlperf": {
        4096: BatchValues(10.0, 5, 0.9, 2e-4),
        8192: BatchValues(17.0, 5, 0.9, 2e-4),
        16384: BatchValues(25.0, 5, 0.9, 2e-4),
        32768: BatchValues(31.2, 25, 0.9, 1e-4),
        65536: BatchValues(24.699, 31, 0.951807, 1e-4),
    },
}


def values_for_batch(table: str, batch_size: int) -> BatchValues:
    """Returns a family's values for a batch, interpolated between the recipes on both sides.

    Along the logarithm of the batch, the warmup goes in a straight line, and so do the logarithms
    of the learning rate, of the decay and of ``1 - momentum``: half-way between 16384 and 32768, at
    23170, stand the geometric means. The rule is ours; the recipes' authors give none.

    Args:
      table: a name in ``BATCH_TABLES``.
      batch_size: images in a weight update.

    Raises:
      UserError: if the batch is smaller or larger than any of the family's.
    """
    rows = BATCH_TABLES[table]
    batches = sorted(rows)
    if not batches[0] <= batch_size <= batches[-1]:
        raise UserError(
            f"batch_table={table} has values for batches from {batches[0]} to {batches[-1]}, not "
            f"for {batch_size}; give learning_rate, warmup, momentum and weight_decay instead"
        )
    if batch_size in rows:
        return rows[batch_size]
    above = bisect.bisect(batches, batch_size)
    below = batches[above - 1]
    low, high = rows[below], rows[batches[above]]
    share = math.log(batch_size / below) / math.log(batches[above] / below)

    def geometric(one: float, other: float) -> float:
        return _rounded(one ** (1 - share) * other**share)

    return BatchValues(
        learning_rate=geometric(low.learning_rate, high.learning_rate),
        warmup_epochs=_rounded((1 - share) * low.warmup_epochs + share * high.warmup_epochs),
        momentum=_rounded(1 - geometric(1 - low.momentum, 1 - high.momentum)),
        weight_decay=geometric(low.weight_decay, high.weight_decay),
    )


def describe(table: str, batch_size: int) -> str:
    """Returns the values for a batch and where they come from, in a line for people.

    Raises:
      UserError: as :func:`values_for_batch`.
    """
    values = values_for_batch(table, batch_size)
    batches = sorted(BATCH_TABLES[table])
    if batch_size in batches:
        source = f"as {table} has them"
    else:
        above = bisect.bisect(batches, batch_size)
        source = f"interpolated between {table}'s for {batches[above - 1]} and {batches[above]}"
    return (
        f"rate {values.learning_rate:g}, warmup {values.warmup_epochs:g} epochs, momentum "
        f"{values.momentum:g}, weight decay {values.weight_decay:g}: {source}"
    )


def _rounded(value: float) -> float:
    """Four digits, which is more than any of the recipes was tuned to."""
    return float(f"{value:.4g}")
