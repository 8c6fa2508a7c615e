"""The options that several parts of the program read."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import NOT_NEGATIVE, POSITIVE, Check, Options, option


@dataclasses.dataclass(frozen=True)
class SharedOptions(Options):
    """What all groups of options begin with: the run's directory, its batches, their types."""

    model_dir: str = option(
        "",
        "directory for checkpoints, metrics and the report; a run found there is resumed",
        group="run",
        free=True,
    )
    batch_size: int = option(
        256,
        "images in a weight update, over all replicas",
        group="optimization",
        check=POSITIVE,
    )
    accumulation_steps: int = option(
        1,
        "micro-batches that each replica's part of the batch is split into, to save memory",
        group="optimization",
        check=POSITIVE,
    )
    eval_batch_size: int = option(
        0,
        "images in a step of evaluation, over all replicas; 0: as many as in a micro-batch of "
        "training, batch_size / accumulation_steps, by `evaluate` at most 256 on each device",
        group="run",
        check=NOT_NEGATIVE,
        free=True,
    )
    seed: int = option(
        0,
        "of all random numbers: first weights, order of the data, augmentation, dropout",
        group="optimization",
        check=Check(lambda value: 0 <= value < 2**32, "be in [0, 2**32)"),
    )
    precision: str = option(
        "float32",
        "weights, logits, loss and batch statistics are float32; type of all else",
        group="hardware",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"batch_size {self.batch_size} cannot be split into "
                f"accumulation_steps={self.accumulation_steps} equal parts"
            )
