"""Options that several folders read."""

from __future__ import annotations

import dataclasses
import unicodedata

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import NOT_NEGATIVE, POSITIVE, Check, Options, option


def _is_name(value: str) -> bool:
    """Whether a path has neither control characters nor bytes that are not UTF-8."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in value)


def _are_replicas(value: tuple[int, ...]) -> bool:
    """Whether the values are none, replicas, or replicas and input pipelines."""
    return (
        len(value) <= 2
        and all(entry > 0 for entry in value)
        and (len(value) < 2 or value[0] % value[1] == 0)
    )


@dataclasses.dataclass(frozen=True)
class SharedOptions(Options):
    """Options that all groups inherit: the run's directory, batch sizes, seed and precision."""

    model_dir: str = option(
        "",
        "directory for checkpoints, metrics and the report; a run found there is resumed",
        group="run",
        check=Check(_is_name, "be text without control characters"),
        may_change_on_resume=True,
    )
    batch_size: int = option(
        256, "images in a weight update, over all replicas", group="optimization", check=POSITIVE
    )
    accumulation_steps: int = option(
        1,
        "micro-batches of consecutive images into which each replica's batch is split, to save "
        "memory; batch norm, mixup and CutMix see one micro-batch at a time",
        group="optimization",
        check=POSITIVE,
    )
    replicas: tuple[int, ...] = option(
        (),
        "logical replicas, whose batches, batch norm and random numbers stay the same on whatever "
        "devices carry them, and optionally input pipelines among which they share the shards, as "
        "256,32; a divisor of batch_size / accumulation_steps; empty: the devices with which the "
        "run begins",
        group="hardware",
        check=Check(_are_replicas, "be a positive number, optionally followed by a divisor of it"),
    )
    eval_batch_size: int = option(
        0,
        "images in an evaluation step, over all replicas; 0: batch_size / accumulation_steps; "
        "`evaluate` then uses at most 256 per device",
        group="run",
        check=NOT_NEGATIVE,
        may_change_on_resume=True,
    )
    seed: int = option(
        0,
        "seed of all random numbers: initial weights, data order, augmentation, dropout",
        group="optimization",
        check=Check(lambda value: 0 <= value < 2**32, "be in [0, 2**32)"),
    )
    precision: str = option(
        "float32",
        "dtype of activations and gradients; weights, logits, loss and batch-norm statistics are "
        "always float32",
        group="hardware",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        may_change_on_resume=True,
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"batch_size {self.batch_size} cannot be split into "
                f"accumulation_steps={self.accumulation_steps} equal parts"
            )
        if self.replicas and self.batch_size % (self.replicas[0] * self.accumulation_steps):
            raise UserError(
                f"batch_size {self.batch_size} cannot be split evenly over {self.replicas[0]} "
                f"replicas with accumulation_steps={self.accumulation_steps}: use a divisor of "
                f"{self.batch_size // self.accumulation_steps} as --replicas"
            )
