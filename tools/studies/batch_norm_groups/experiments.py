"""The experiments of the batch-norm study."""

from __future__ import annotations

import pathlib

from study.settings import Experiment, Setting

from imagenet_fast.config import Config

_BASE = pathlib.Path(__file__).parents[1] / "large_batch" / "base.flags"
BATCH, REPLICAS = 1024, 16

GROUPS, MICRO_BATCHES = "replicas in groups", "micro-batches of one device"


def normalization_batch(setting: Setting) -> int:
    """Returns the number of images that share batch-norm statistics."""
    config = setting.config
    return config.batch_norm_batch_size or config.batch_size // config.accumulation_steps


def groups() -> Experiment:
    """Accuracy against the number of images that share batch-norm statistics.

    Sixteen replicas of 64 images, in groups of 1 to 16; and one device that splits its batch of
    1024 into micro-batches of 8 to 1024, each with its own statistics: the same mathematics, for
    sizes that 16 replicas do not reach.
    """
    base = Config.from_flagfile(_BASE, batch_size=BATCH)
    images_per_replica = BATCH // REPLICAS
    settings = [
        Setting(
            GROUPS,
            base.replace(
                strategy="mirrored",
                logical_cpus=REPLICAS,
                batch_norm_batch_size=images_per_replica * size,
            ),
        )
        for size in (1, 2, 4, 8, 16)
    ]
    settings += [
        Setting(MICRO_BATCHES, base.replace(accumulation_steps=BATCH // images))
        for images in (8, 16, 32, 64, 128, 256, 512, 1024)
    ]
    return Experiment("groups", tuple(settings))


EXPERIMENTS = (groups(),)
