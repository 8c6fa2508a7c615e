"""In which order training reads its images, and which of them each worker gets.

::

    shards in the epoch's order -> parallel interleave -> shuffle -> this worker's share
      -> skip what a resumed run has seen -> batch

The order is a function of (seed, epoch, step) alone; nothing has to be saved to continue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.info import SplitInfo
from imagenet_fast.data.options import DataOptions

# Above this many bytes, a worker reads shards of its own instead of its share of all.
_LARGE = 2**30
_SHARDS_AT_ONCE = 16

# From a shard's path, its number of records and the number of those in the shards before it.
ReadShard = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class Share:
    """One of the input pipelines, of which each host has one, and what it reads of a split.

    Attributes:
      paths: of the shards, in the order of their numbers.
      counts: records in each.
      pipelines: how many there are.
      pipeline: which of them this is.
      by_files: whether the shards are its own, so that it needs all of their records, but those of
        the next two; else they are all pipelines', and it needs each ``pipelines``-th.
      before: records at the start of the first shard that are another pipeline's.
      behind: records at the end of the last shard that are another pipeline's.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    pipelines: int
    pipeline: int
    by_files: bool
    before: int = 0
    behind: int = 0

    @property
    def examples(self) -> int:
        """Number of records in the shards that are not another pipeline's."""
        return sum(self.counts) - self.before - self.behind

    def shards(self) -> tf.data.Dataset:
        """Returns the arguments of what :func:`own_records` returns, shard by shard."""
        counts = np.array(self.counts, np.int64)
        firsts, own = np.zeros_like(counts), counts.copy()
        firsts[0] = self.before
        own[0] -= self.before
        own[-1] -= self.behind
        starts = np.cumsum(own) - own
        return tf.data.Dataset.from_tensor_slices((list(self.paths), counts, starts, firsts, own))

    def interleave(
        self, shards: tf.data.Dataset, read_shard: ReadShard, threads: int
    ) -> tf.data.Dataset:
        """Returns the records of the shards, some shards at a time."""
        return shards.interleave(
            own_records(read_shard),
            cycle_length=_SHARDS_AT_ONCE,
            num_parallel_calls=threads,
            deterministic=True,
        )

    def own(self, records: tf.data.Dataset) -> tf.data.Dataset:
        """Returns this pipeline's records of all that its shards hold."""
        return records if self.by_files else records.shard(self.pipelines, self.pipeline)


def share_of(split: SplitInfo, options: DataOptions, pipelines: int, pipeline: int) -> Share:
    """Returns what an input pipeline reads.

    Raises:
      UserError: if there are fewer shards than pipelines that are to have shards of their own.
    """
    if not is_by_files(split, options, pipelines):
        return Share(split.paths, split.counts, pipelines, pipeline, by_files=False)
    # In turn, so that where the numbers divide, no shard is cut. Else two pipelines read one shard,
    # since each must have as many records in an epoch as the others.
    order = [
        shard for first in range(pipelines) for shard in range(len(split.paths))[first::pipelines]
    ]
    ends = np.cumsum([split.counts[shard] for shard in order])
    begin, end = (split.examples * own // pipelines for own in (pipeline, pipeline + 1))
    first = min(int(np.searchsorted(ends, begin, side="right")), len(order) - 1)
    # There may be fewer records than pipelines.
    last = max(int(np.searchsorted(ends, end, side="left")), first)
    own = order[first : last + 1]
    return Share(
        tuple(split.paths[shard] for shard in own),
        tuple(split.counts[shard] for shard in own),
        pipelines,
        pipeline,
        by_files=True,
        before=int(begin - ends[first] + split.counts[own[0]]),
        behind=int(ends[last] - end),
    )


def own_records(read_shard: ReadShard) -> Callable[..., tf.data.Dataset]:
    """Returns what reads a share's records of one of its shards.

    Its arguments are the shard's path and number of records, the number of the share's records in
    the shards before it, the number of the first of this shard's that are the share's, and how many
    these are.
    """

    def read(
        path: tf.Tensor, count: tf.Tensor, start: tf.Tensor, first: tf.Tensor, own: tf.Tensor
    ) -> tf.data.Dataset:
        return read_shard(path, count, start - first).skip(first).take(own)

    return read


def is_by_files(split: SplitInfo, options: DataOptions, pipelines: int) -> bool:
    """Returns whether each input pipeline reads shards of its own, as ``options.shard_by`` says.

    Raises:
      UserError: if there are fewer shards than pipelines that are to have shards of their own.
    """
    if pipelines == 1 or options.shard_by == "records":
        return False
    if options.shard_by == "auto" and split.bytes < _LARGE:
        return False
    if len(split.paths) < pipelines:
        raise UserError(
            f"{len(split.paths)} shards are too few for {pipelines} workers to have shards of "
            "their own: prepare the data with more, or use --shard_by=records"
        )
    return True


def training_order(
    share: Share,
    read_shard: ReadShard,
    options: DataOptions,
    *,
    batch_size: int,
    images_per_step: int,
    steps_per_epoch: int,
    first_step: int,
    threads: int,
) -> tf.data.Dataset:
    """Returns what training reads, epoch after epoch, without end.

    Args:
      share: of this input pipeline.
      read_shard: gives what is to be put into order.
      options: gives ``seed`` and ``shuffle_buffer``.
      batch_size: of what is returned.
      images_per_step: that this input pipeline gives to a weight update, in whole batches.
      steps_per_epoch: weight updates.
      first_step: the weight update that comes first.
      threads: that read.

    Returns:
      Batches of what ``read_shard`` gave, [batch_size, ...], and of the images' identities for
      :func:`stateless_random.uniform`, int64 [batch_size, 3].
    """
    first_epoch, seen_steps = divmod(first_step, steps_per_epoch)

    def epoch_records(epoch: tf.Tensor) -> tf.data.Dataset:
        # Any two (seed, epoch) have shuffles that have nothing to do with each other.
        seeds = tf.random.stateless_uniform(
            [2, 2], tf.stack([tf.cast(options.seed, tf.int64), epoch]), 0, tf.int64.max, tf.int64
        )
        shards = _shuffle(share.shards(), len(share.paths), seeds[0])
        records = share.interleave(shards, read_shard, threads)
        records = share.own(_shuffle(records, options.shuffle_buffer, seeds[1]))
        records = records.take(steps_per_epoch * images_per_step)

        def identify(indices: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            places = indices * share.pipelines + share.pipeline
            seeds = tf.fill([batch_size], tf.cast(options.seed, tf.int64))
            return records, tf.stack([seeds, tf.fill([batch_size], epoch), places], axis=1)

        seen = tf.where(epoch == first_epoch, tf.cast(seen_steps, tf.int64), 0)
        records = records.enumerate().skip(seen * images_per_step)
        return records.batch(batch_size, drop_remainder=True).map(identify)

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_records)


def _shuffle(dataset: tf.data.Dataset, buffer_size: int, seeds: tf.Tensor) -> tf.data.Dataset:
    """Does what ``dataset.shuffle`` does, but as a function of ``seeds``, int64 [2], alone.

    The method mixes in TensorFlow's global seed, which is whatever ran before.
    """
    spec = dataset.element_spec
    shuffled = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        output_types=[part.dtype for part in tf.nest.flatten(spec)],
        output_shapes=[part.shape for part in tf.nest.flatten(spec)],
        reshuffle_each_iteration=False,
    )
    return tf.data.experimental.from_variant(shuffled, spec)
