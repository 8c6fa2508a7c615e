"""What the input benchmark reads, in training's order."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data.cache import read_indices, records_from_memory
from imagenet_fast.data.info import DatasetInfo, SplitInfo
from imagenet_fast.data.order import Share, share_of, training_order
from imagenet_fast.data.pipeline import thread_count
from imagenet_fast.data.shards import read_shard

# Of the first shards: a cache must hold them several times, once for each number of threads.
_MOST_BYTES = 2**31


def training_records(info: DatasetInfo, config: Config) -> tf.data.Dataset:
    """Returns batches of records and identities as training reads them, but of few shards.

    Args:
      info: of the data.
      config: its ``cache`` must not be ``decoded``.
    """
    threads = thread_count(config)
    share = _few_shards(info.splits["train"], config)
    order = training_order(
        share,
        read_shard if config.cache == "none" else read_indices,
        config,
        batch_size=config.batch_size,
        images_per_step=config.batch_size,
        steps_per_epoch=max(sum(share.counts) // config.batch_size, 1),
        first_step=0,
        threads=threads,
    )
    return order if config.cache == "none" else records_from_memory(order, share, threads)


def _few_shards(split: SplitInfo, config: Config) -> Share:
    """Returns as many shards as fit, and at least one."""
    count = max(int(len(split.paths) * min(_MOST_BYTES / split.bytes, 1)), 1)
    few = SplitInfo(
        split.paths[:count],
        split.counts[:count],
        split.bytes * count // len(split.paths),
        sum(split.counts[:count]),
    )
    return share_of(few, config, pipelines=1, pipeline=0)
