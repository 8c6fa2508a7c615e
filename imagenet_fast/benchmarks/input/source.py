"""The records that the input benchmark reads, in training's order."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data.cache import read_indices, records_from_memory
from imagenet_fast.data.info import DatasetInfo, SplitInfo
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.order import SplitPart, part_of, training_order
from imagenet_fast.data.pipeline import thread_count
from imagenet_fast.data.shards import read_shard

# The size of the shards that are read: caches hold them once for each number of threads.
_MAX_BYTES = 2**31


def training_records(info: DatasetInfo, options: InputOptions) -> tf.data.Dataset:
    """Returns batches of records and identities as training reads them, but from few shards.

    Args:
      info: of the data.
      options: its ``cache`` must not be ``decoded``.
    """
    threads = thread_count(options)
    part = _few_shards(info.splits["train"], options)
    order = training_order(
        part,
        read_shard if options.cache == "none" else read_indices,
        options,
        batch_size=options.batch_size,
        images_per_step=options.batch_size,
        steps_per_epoch=max(sum(part.counts) // options.batch_size, 1),
        first_step=0,
        threads=threads,
    )
    return order if options.cache == "none" else records_from_memory(order, part, options, threads)


def _few_shards(split: SplitInfo, options: InputOptions) -> SplitPart:
    """Returns the first shards, at most 2 GiB or one shard."""
    count = max(int(len(split.paths) * min(_MAX_BYTES / split.bytes, 1)), 1)
    few = SplitInfo(
        split.paths[:count],
        split.counts[:count],
        split.bytes * count // len(split.paths),
        sum(split.counts[:count]),
    )
    return part_of(few, options, pipelines=1, pipeline=0)
