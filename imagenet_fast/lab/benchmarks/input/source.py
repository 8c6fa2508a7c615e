"""The records that the input benchmark reads, in training's order."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.batches import uses_jpeg_index
from imagenet_fast.data.cache import read_indices, records_from_memory
from imagenet_fast.data.dataset import thread_count
from imagenet_fast.data.examples import JPEG_INDEX
from imagenet_fast.data.info import DatasetInfo, SplitInfo, read_info
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.jpeg.index import LEAST_PIXELS
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.order import Share, SplitPart, part_of, training_order
from imagenet_fast.data.shards import shard_reader

# The size of the shards that are read: caches hold them once for each number of threads.
_MAX_BYTES = 2**31


def training_records(
    info: DatasetInfo, options: InputOptions, *, refer: bool = False
) -> tf.data.Dataset:
    """Returns batches of records and identities as training reads them, but from few shards.

    Their ``cache`` must not be ``decoded``. With ``refer``, records may be references, as those of
    ``shards.read_shard``.
    """
    threads = thread_count(options)
    part = _few_shards(info.splits["train"], options)
    order = training_order(
        Share(part, options.batch_size, options.batch_size, (0, 1)),
        shard_reader(part.paths, refer=refer) if options.cache == "none" else read_indices,
        options,
        steps_per_epoch=max(sum(part.counts) // options.batch_size, 1),
        first_step=0,
        threads=threads,
    )
    return order if options.cache == "none" else records_from_memory(order, part, threads)


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


def require_indexes(options: InputOptions, split: str, images: int) -> None:
    """Checks that JPEG indexes are used, and that some images of a split have one.

    It looks at the first ``images`` of the split.

    Raises:
      UserError: if an option turns indexes off, or none of these images has one.
    """
    if not uses_jpeg_index(with_resize_kernel(options)):
        raise UserError(
            "indexes are not used, so there is nothing to compare: leave out --nojpeg_index, and "
            "install a C++ compiler if there is none"
        )
    info = read_info(options)
    if split not in info.splits:
        return  # which the pipeline reports
    part = part_of(info.splits[split], options, pipelines=1, pipeline=0)
    read_shard = shard_reader(part.paths)
    records = part.interleave(part.shards(), read_shard, thread_count(options)).take(images)
    indexes = records.map(_index_of).ignore_errors()  # damaged records are counted in training
    if not list(indexes.filter(lambda index: tf.strings.length(index) > 0).take(1)):
        looked_at = counted(min(images, part.examples), f"{split} image")
        raise UserError(
            f"{options.data_dir}: no JPEG has an index, among the first {looked_at}, so there is "
            "nothing to compare: `imagenet-fast prepare --add_index "
            f"--data_dir={options.data_dir}` adds indexes to baseline JPEGs of at least "
            f"{LEAST_PIXELS:,} pixels; others cannot have one"
        )


def _index_of(record: tf.Tensor) -> tf.Tensor:
    index = tf.io.FixedLenFeature([], tf.string, default_value="")
    return tf.io.parse_single_example(record, {JPEG_INDEX: index})[JPEG_INDEX]
