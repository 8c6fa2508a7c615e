"""What the study of batch norm over groups trains."""

from __future__ import annotations

import pathlib

from study.settings import Experiment, Setting

from imagenet_fast.config import Config

_BASE = pathlib.Path(__file__).parents[1] / "large_batch" / "base.flags"
BATCH, REPLICAS = 1024, 16

GROUPS, MICRO_BATCHES = "replicas in groups", "micro-batches of one device"


def normalization_batch(setting: Setting) -> int:
    """Returns the images over which batch norm takes its statistics."""
    config = setting.config
    return config.batch_norm_batch_size or config.batch_size // config.accumulation_steps


def groups() -> Experiment:
    """Accuracy against the images over which batch norm takes its statistics.

    Sixteen replicas of 64 images, in groups of 1 to 16; and one device, that cuts its batch of 1024
    into micro-batches of 8 to 1024, which batch norm sees one by one: the same mathematics, for
    sizes that 16 replicas of one process do not reach.
    """
    base = Config.from_flagfile(_BASE, batch_size=BATCH)
    share = BATCH // REPLICAS
    settings = [
        Setting(
            GROUPS,
            base.replace(
                strategy="mirrored", logical_cpus=REPLICAS, batch_norm_batch_size=share * size
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
