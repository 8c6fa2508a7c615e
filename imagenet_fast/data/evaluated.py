"""Which image of a split is in which row of an evaluation, and the images' names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from imagenet_fast.data.examples import file_name
from imagenet_fast.data.info import DatasetInfo, SplitInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.order import part_of
from imagenet_fast.data.records import lost_record
from imagenet_fast.data.shards import ReadShard, shard_reader
from imagenet_fast.data.steps import evaluation_batch_size, evaluation_steps, input_pipelines

_AT_ONCE = 4096
_THREADS = 4
_PADDING = -1


@tf.autograph.experimental.do_not_convert
def evaluated_images(
    info: DatasetInfo, options: DataOptions, strategy: tf.distribute.Strategy, split: str
) -> np.ndarray:
    """Returns the image in each row of an evaluation, the rows of the first replica first.

    Returns:
      int64 [replicas * rows]: the index of the image in the split, shard by shard; -1: padding.
    """
    part_info = info.splits[split]
    replicas = strategy.num_replicas_in_sync
    steps = evaluation_steps(info, options, strategy, split)
    size = evaluation_batch_size(options, strategy, part_info.examples)
    if options.data_on_device:  # Each replica takes its part of every batch of all.
        pipelines, orders = 1, [np.arange(part_info.examples)]
    else:
        pipelines = input_pipelines(strategy)
        orders = [_order(part_info, options, pipelines, index) for index in range(pipelines)]
    batches = []
    for order in orders:
        rows = np.full(steps * replicas // pipelines * size, _PADDING)
        rows[: len(order)] = order
        # A pipeline gives its replicas their batches in turn.
        batches.append(rows.reshape(steps, -1, size).swapaxes(0, 1))
    return np.concatenate(batches).ravel()


def _order(split: SplitInfo, options: DataOptions, pipelines: int, pipeline: int) -> np.ndarray:
    """Returns the indices of the images that an input pipeline reads, in its order."""
    part = part_of(split, options, pipelines, pipeline)
    firsts = np.cumsum(split.counts, dtype=np.int64) - split.counts
    first_of = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(split.paths), tf.constant(firsts)), -1
    )

    def read(path: tf.Tensor, count: tf.Tensor, _: tf.Tensor) -> tf.data.Dataset:
        first = first_of.lookup(path)
        return tf.data.Dataset.range(first, first + count)

    indices = part.select(part.interleave(part.shards(), read, _THREADS))
    return np.concatenate([np.zeros(0, np.int64), *indices.batch(_AT_ONCE).as_numpy_iterator()])


def file_names(info: DatasetInfo, split: str) -> Iterator[str]:
    """Yields the name of each image of a split, shard by shard, as of :func:`file_names_of`."""
    found = info.splits[split]
    read = shard_reader(found.paths)
    for path, count in zip(found.paths, found.counts):
        records = read(tf.constant(path), tf.constant(count, tf.int64), _NONE_BEFORE)
        for record in records.as_numpy_iterator():
            yield _name(record)


@tf.autograph.experimental.do_not_convert
def file_names_of(info: DatasetInfo, split: str, images: Sequence[int]) -> list[str]:
    """Returns the names of some images, as their source had them; empty: none is recorded.

    ``images`` are their indices, as of :func:`evaluated_images`.
    """
    found = info.splits[split]
    ends = np.cumsum(found.counts, dtype=np.int64)
    wanted = np.asarray(images, np.int64)
    shards = np.searchsorted(ends, wanted, side="right")
    read: ReadShard = shard_reader(found.paths)

    def record(path: tf.Tensor, count: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return read(path, count, _NONE_BEFORE).skip(index).take(1).get_single_element()

    counts = np.asarray(found.counts, np.int64)
    places = (
        np.asarray(found.paths, object)[shards].astype(np.bytes_),
        counts[shards],
        wanted - (ends - counts)[shards],
    )
    records = tf.data.Dataset.from_tensor_slices(places).map(record, _THREADS, deterministic=True)
    return [_name(record) for record in records.as_numpy_iterator()]


def _name(record: bytes) -> str:
    return "" if lost_record(record) else file_name(record)


# Readers of shards number records by it, which is not used here.
_NONE_BEFORE = np.int64(0)
