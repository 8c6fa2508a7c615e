"""The order in which training reads images, and the division of images among input pipelines.

::

    shards in the epoch's order -> parallel interleave -> shuffle
      -> skip what a resumed run has read -> batch -> the host's batches of each step

The order is a function of (seed, epoch, step) alone, so resuming needs no saved state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.info import SplitInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.sampling import Sampling
from imagenet_fast.data.shards import ReadShard

# Above this size in bytes, `shard_by=auto` gives each pipeline its own shards.
_LARGE = 2**30
_SHARDS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class SplitPart:
    """The part of a split that one input pipeline reads; each host has one pipeline.

    With ``by_files``, the pipeline has its own shards and reads all of their records but those of
    ``before`` and ``after``; otherwise all pipelines read all shards, and each evaluates every
    ``pipelines``-th record.
    """

    paths: tuple[str, ...]  # of the shards, in order
    counts: tuple[int, ...]  # of records in each shard
    pipelines: int  # number of input pipelines
    pipeline: int  # index of this one
    by_files: bool
    before: int = 0  # records at the start of the first shard that belong to another pipeline
    after: int = 0  # likewise at the end of the last shard

    @property
    def examples(self) -> int:
        """Number of records in the shards, without those of ``before`` and ``after``."""
        return sum(self.counts) - self.before - self.after

    def shards(self) -> tf.data.Dataset:
        """Returns, for each shard, the arguments of the function that :func:`part_reader` makes."""
        counts = np.array(self.counts, np.int64)
        firsts, used = np.zeros_like(counts), counts.copy()
        firsts[0] = self.before
        used[0] -= self.before
        used[-1] -= self.after
        starts = np.cumsum(used) - used
        return tf.data.Dataset.from_tensor_slices((list(self.paths), counts, starts, firsts, used))

    def interleave(
        self,
        shards: tf.data.Dataset,
        read_shard: ReadShard,
        threads: int,
        copies: tf.Tensor | None = None,
    ) -> tf.data.Dataset:
        """Returns the records of the shards, reading several shards in parallel.

        Args:
          shards: of :meth:`shards`.
          read_shard: reads a shard.
          threads: number of threads.
          copies: how often to repeat each record, int64 [records]; None: once each.
        """
        return shards.interleave(
            part_reader(read_shard, copies),
            cycle_length=_SHARDS_AT_ONCE,
            num_parallel_calls=threads,
            deterministic=True,
        )

    def select(self, records: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the records to evaluate from the records of :meth:`interleave`."""
        return records if self.by_files else records.shard(self.pipelines, self.pipeline)


def part_of(split: SplitInfo, options: DataOptions, pipelines: int, pipeline: int) -> SplitPart:
    """Returns the part of a split that an input pipeline reads.

    Raises:
      UserError: if each pipeline is to have its own shards, but there are fewer shards.
    """
    if not is_by_files(split, options, pipelines):
        return SplitPart(split.paths, split.counts, pipelines, pipeline, by_files=False)
    # Shards are dealt in turn: if the numbers divide, no shard is split. Otherwise two pipelines
    # read the same shard, because all pipelines need equally many records in an epoch.
    order = [
        shard for first in range(pipelines) for shard in range(len(split.paths))[first::pipelines]
    ]
    ends = np.cumsum([split.counts[shard] for shard in order])
    begin, end = (split.examples * index // pipelines for index in (pipeline, pipeline + 1))
    first = min(int(np.searchsorted(ends, begin, side="right")), len(order) - 1)
    # There may be fewer records than pipelines.
    last = max(int(np.searchsorted(ends, end, side="left")), first)
    shards = order[first : last + 1]
    return SplitPart(
        tuple(split.paths[shard] for shard in shards),
        tuple(split.counts[shard] for shard in shards),
        pipelines,
        pipeline,
        by_files=True,
        before=int(begin - ends[first] + split.counts[shards[0]]),
        after=int(ends[last] - end),
    )


class Share(NamedTuple):
    """What a host takes of an input pipeline's images in each training step."""

    part: SplitPart  # what the pipeline reads
    images: int  # of the pipeline in a step, a multiple of ``batch_size``
    batch_size: int  # of the batches in which the host takes them
    window: tuple[int, int]  # the first of its batches among the pipeline's in a step, and the end


def shares_of(
    split: SplitInfo, options: DataOptions, batch_size: int, hosts: int, host: int
) -> list[Share]:
    """Returns a host's shares of a training step, in the order of the step's images.

    A step's images are those of the first pipeline, the second one and so on; hosts take equal
    parts of them, in turn. So they do not depend on the number of hosts, but on that of pipelines:
    ``options.replicas`` or, without it, one for each host if these have shards of their own. The
    batch size is that of each of the host's batches.

    Raises:
      UserError: if each pipeline is to have its own shards, but there are fewer shards.
    """
    pipelines = options.replicas[1] if len(options.replicas) > 1 else hosts
    if not is_by_files(split, options, pipelines):
        pipelines = 1
    images = options.batch_size // pipelines
    begin, end = (options.batch_size * index // hosts for index in (host, host + 1))
    unit = math.gcd(batch_size, images)
    shares = []
    for pipeline in range(begin // images, -(-end // images)):
        first = pipeline * images
        window = (max(begin, first) - first) // unit, (min(end, first + images) - first) // unit
        shares.append(Share(part_of(split, options, pipelines, pipeline), images, unit, window))
    return shares


def part_reader(
    read_shard: ReadShard, copies: tf.Tensor | None = None
) -> Callable[..., tf.data.Dataset]:
    """Returns a function that reads a part's records of one shard.

    Its arguments: the shard's path and number of records; the number of the part's records in
    earlier shards; the index of the part's first record in this shard, and the number of the part's
    records in it. Each is repeated as often as ``copies``, int64 [records], says; None: is there
    once.
    """

    def read(
        path: tf.Tensor, count: tf.Tensor, start: tf.Tensor, first: tf.Tensor, used: tf.Tensor
    ) -> tf.data.Dataset:
        records = read_shard(path, count, start - first).skip(first).take(used)
        if copies is None:
            return records
        indices = tf.data.Dataset.range(start, start + used)
        return tf.data.Dataset.zip((records, indices)).flat_map(
            lambda record, index: tf.data.Dataset.from_tensors(record).repeat(copies[index])
        )

    return read


def is_by_files(split: SplitInfo, options: DataOptions, pipelines: int) -> bool:
    """Returns whether ``options.shard_by`` gives each input pipeline its own shards.

    Raises:
      UserError: if it does, but there are fewer shards than pipelines.
    """
    # Classes are drawn from all images.
    if pipelines == 1 or options.shard_by == "records" or options.sampling:
        return False
    if options.shard_by == "auto" and split.bytes < _LARGE:
        return False
    if len(split.paths) < pipelines:
        raise UserError(
            f"{len(split.paths)} shards are too few for {pipelines} workers with shards of their "
            "own: prepare the data with more shards, or use --shard_by=records"
        )
    return True


def training_order(
    share: Share,
    read_shard: ReadShard,
    options: DataOptions,
    *,
    steps_per_epoch: int,
    first_step: int,
    threads: int,
    sampling: Sampling | None = None,
) -> tf.data.Dataset:
    """Returns an infinite dataset of a host's training records, epoch after epoch, in batches.

    ``read_shard`` reads a shard's records, or what represents them. ``first_step`` is counted from
    the start of training. ``sampling`` draws the images of an epoch; None: each is read once.

    Returns:
      Batches of what ``read_shard`` returns, [batch_size, ...], and of the images' identities for
      :func:`stateless_random.uniform`, int64 [batch_size, 3].
    """
    part, images_per_step, batch_size, (begin, end) = share
    first_epoch, skipped_steps = divmod(first_step, steps_per_epoch)

    def epoch_records(epoch: tf.Tensor) -> tf.data.Dataset:
        # Shuffles of different (seed, epoch) are independent.
        seeds = tf.random.stateless_uniform(
            [2, 2], tf.stack([tf.cast(options.seed, tf.int64), epoch]), 0, tf.int64.max, tf.int64
        )
        shards = _shuffle(part.shards(), len(part.paths), seeds[0])
        copies = None
        if sampling is not None:
            copies = sampling.copies(epoch, steps_per_epoch * images_per_step * part.pipelines)
        records = part.interleave(shards, read_shard, threads, copies)
        records = _shuffle(records, options.shuffle_buffer, seeds[1])
        records = records.take(steps_per_epoch * images_per_step)

        skipped = tf.where(epoch == first_epoch, tf.cast(skipped_steps, tf.int64), 0)
        skipped *= images_per_step

        def is_own(batch: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            in_step = batch % (images_per_step // batch_size)
            return (begin <= in_step) & (in_step < end)

        def identify(batch: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            indices = skipped + batch * batch_size + tf.range(batch_size, dtype=tf.int64)
            places = indices * part.pipelines + part.pipeline
            seeds = tf.fill([batch_size], tf.cast(options.seed, tf.int64))
            return records, tf.stack([seeds, tf.fill([batch_size], epoch), places], axis=1)

        batches = records.skip(skipped).batch(batch_size, drop_remainder=True).enumerate()
        if end - begin < images_per_step // batch_size:
            batches = batches.filter(is_own)
        return batches.map(identify)

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_records)


def _shuffle(dataset: tf.data.Dataset, buffer_size: int, seeds: tf.Tensor) -> tf.data.Dataset:
    """Like ``dataset.shuffle``, but a function of ``seeds``, int64 [2], alone.

    ``dataset.shuffle`` also depends on TensorFlow's global seed, which other code may set.
    """
    spec = dataset.element_spec
    shuffled = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        output_types=[tensor.dtype for tensor in tf.nest.flatten(spec)],
        output_shapes=[tensor.shape for tensor in tf.nest.flatten(spec)],
        reshuffle_each_iteration=False,
    )
    return tf.data.experimental.from_variant(shuffled, spec)
