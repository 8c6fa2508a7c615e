"""Hyperparameters of LARS recipes by batch size, interpolated between published batch sizes."""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, require_choice


@dataclasses.dataclass(frozen=True)
class BatchValues:
    """The hyperparameters of a LARS recipe that depend on the batch size.

    Attributes:
      learning_rate: after the warmup.
      warmup_epochs: length of the warmup, which starts at learning rate 0.
      momentum: decay factor of the momentum buffer.
      weight_decay: L2 coefficient.
    """

    learning_rate: float
    warmup_epochs: float
    momentum: float
    weight_decay: float


# google_tpu_pod: Google's TPU code for ResNet (tensorflow/tpu), with LARS from batch 16384 on.
# mlperf: the reference code's README (4096), Google's reference convergence points (8192, 65536)
# and Google's submissions to round 0.6 (16384, 32768). Those decay weights twice, in the loss and
# in LARS (see mlperf_32k): here is twice their flag's value.
BATCH_TABLES: dict[str, dict[int, BatchValues]] = {
    "google_tpu_pod": {
        16384: BatchValues(25.0, 5, 0.9, 1e-4),
        32768: BatchValues(32.0, 14, 0.9, 1e-4),
        65536: BatchValues(35.6, 40, 0.9, 1e-4),
    },
    "mlperf": {
        4096: BatchValues(10.0, 5, 0.9, 2e-4),
        8192: BatchValues(17.0, 5, 0.9, 2e-4),
        16384: BatchValues(25.0, 5, 0.9, 4e-4),
        32768: BatchValues(31.2, 25, 0.9, 2e-4),
        65536: BatchValues(24.699, 31, 0.951807, 1e-4),
    },
}


def values_for_batch(table: str, batch_size: int) -> BatchValues:
    """Returns a table's values for a batch size, interpolated between its two neighbours.

    Interpolation is linear in the logarithm of the batch size: of the warmup, and of the logarithms
    of learning rate, weight decay and ``1 - momentum``. Half-way between 16384 and 32768, at 23170,
    these are geometric means. The rule is this package's; the recipes' authors give none.

    Raises:
      UserError: if there is no such table, or the batch size is outside its range.
    """
    require_choice("batch_table", table, BATCH_TABLES)
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
    fraction = math.log(batch_size / below) / math.log(batches[above] / below)

    def geometric(one: float, other: float) -> float:
        return _rounded(one ** (1 - fraction) * other**fraction)

    return BatchValues(
        learning_rate=geometric(low.learning_rate, high.learning_rate),
        warmup_epochs=_rounded((1 - fraction) * low.warmup_epochs + fraction * high.warmup_epochs),
        momentum=_rounded(1 - geometric(1 - low.momentum, 1 - high.momentum)),
        weight_decay=geometric(low.weight_decay, high.weight_decay),
    )


def options_for_batch(table: str, batch_size: int) -> dict[str, Any]:
    """Returns the options that train with a table's values, for ``Config(**options)``.

    Raises:
      UserError: as :func:`values_for_batch`.
    """
    values = values_for_batch(table, batch_size)
    return {
        "batch_size": batch_size,
        "learning_rate": values.learning_rate,
        "rate_scaling": "none",
        "warmup": Duration(values.warmup_epochs, "epochs"),
        "warmup_start": 0.0,
        "momentum": values.momentum,
        "weight_decay": values.weight_decay,
    }


def _rounded(value: float) -> float:
    """Rounds to four digits, more than any of the recipes was tuned to."""
    return float(f"{value:.4g}")
