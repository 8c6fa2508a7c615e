"""The tf.data graph: from shards to batches of uint8 images, in an order that can be repeated.

Training::

    shards in the epoch's order -> parallel interleave -> shuffle -> this worker's share
      -> skip what a resumed run has seen -> batch -> decode, crop, augment -> prefetch

The order is a function of (seed, epoch, step), and so is each image's augmentation; nothing has to
be saved to continue. Images are decoded a batch at a time: where one fails, only its batch is done
again with care, so that good batches cost no more than if nothing could fail.

A batch is ``(images, labels, weights)``: uint8 [batch, size, size, 3], int32 [batch] and float32
[batch]. The weight is 1; 0 marks an image that could not be read, whose place is kept so that
shapes and positions stay what they are. Label -1 marks padding, which only evaluation has.
"""

from __future__ import annotations

import os

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data import decode
from imagenet_fast.data.augment import augment
from imagenet_fast.data.info import DatasetInfo, SplitInfo, read_info
from imagenet_fast.data.records import ENCODED, LABEL, salvage_records
from imagenet_fast.distribute.strategy import make_strategy, per_replica_batch_size
from imagenet_fast.errors import UserError

# Above this many bytes, a worker reads shards of its own instead of its share of all.
_LARGE = 2**30
_SHARDS_AT_ONCE = 16
# For each replica, ready while it computes.
_BATCHES_AHEAD = 2
_PADDING = -1


def make_dataset(
    config: Config, split: str, first_step: int = 0
) -> tf.distribute.DistributedDataset:
    """Returns the batches of a split, for ``model.fit`` or ``model.evaluate``.

    Args:
      config: names the data and says how to read it.
      split: ``train``: endless, epoch after epoch; or ``validation``: each image once, padded to
        whole batches.
      first_step: the weight update that the first training batch is for.

    Raises:
      UserError: if there is no such split, or the data cannot be used.
    """
    info = read_info(config)
    if split not in info.splits:
        raise UserError(f"{info.name} has no {split} split, only {', '.join(info.splits)}")
    strategy = make_strategy(config)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = strategy.num_replicas_in_sync // context.num_input_pipelines
        if config.synthetic:
            dataset = _synthetic(config, per_replica_batch_size(config, strategy))
        elif split == "train":
            size = per_replica_batch_size(config, strategy)
            dataset = _training_batches(info, config, context, size, size * replicas, first_step)
        else:
            size = _evaluation_batch_size(config, strategy)
            steps = evaluation_steps(info, config, strategy)
            dataset = _evaluation_batches(info, config, context, size).take(steps * replicas)
        options = tf.data.Options()
        options.threading.private_threadpool_size = _threads(config)
        # There is nothing to tune, and an iterator can wait for the tuner half a minute to end.
        options.autotune.enabled = False
        # Each worker has taken its share already.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.prefetch(_BATCHES_AHEAD * replicas).with_options(options)

    return strategy.distribute_datasets_from_function(batches)


def steps_per_epoch(info: DatasetInfo, config: Config) -> int:
    """Returns the weight updates of an epoch; what does not fill a batch waits for the next."""
    return info.splits["train"].examples // config.batch_size


def evaluation_steps(info: DatasetInfo, config: Config, strategy: tf.distribute.Strategy) -> int:
    """Returns the steps in which all workers have seen all their validation images."""
    split = info.splits["validation"]
    pipelines = _input_pipelines(strategy)
    if _by_files(split, config, pipelines):
        most = max(sum(split.counts[i::pipelines]) for i in range(pipelines))
    else:
        most = -(-split.examples // pipelines)
    replicas = strategy.num_replicas_in_sync // pipelines
    return -(-most // (_evaluation_batch_size(config, strategy) * replicas))


def _evaluation_batch_size(config: Config, strategy: tf.distribute.Strategy) -> int:
    return -(-(config.eval_batch_size or config.batch_size) // strategy.num_replicas_in_sync)


def _input_pipelines(strategy: tf.distribute.Strategy) -> int:
    """Returns how many hosts feed the replicas, each from a pipeline of its own."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        # A process sees its own devices only.
        return strategy.cluster_resolver.cluster_spec().num_tasks("worker")
    devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
    return len({device.task for device in devices})


def _threads(config: Config) -> int:
    return config.data_threads or os.cpu_count() or 1


def _by_files(split: SplitInfo, config: Config, pipelines: int) -> bool:
    if pipelines == 1 or config.shard_by == "records":
        return False
    if config.shard_by == "auto" and split.bytes < _LARGE:
        return False
    if len(split.paths) < pipelines:
        raise UserError(
            f"{len(split.paths)} shards are too few for {pipelines} workers to have shards of "
            "their own: prepare the data with more, or use --shard_by=records"
        )
    return True


def _training_batches(
    info: DatasetInfo,
    config: Config,
    context: tf.distribute.InputContext,
    batch_size: int,
    pipeline_batch_size: int,
    first_step: int,
) -> tf.data.Dataset:
    split = info.splits["train"]
    pipelines, pipeline = context.num_input_pipelines, context.input_pipeline_id
    by_files = _by_files(split, config, pipelines)
    steps = steps_per_epoch(info, config)
    first_epoch, seen_steps = divmod(first_step, steps)

    def epoch_records(epoch: tf.Tensor) -> tf.data.Dataset:
        # Any two (seed, epoch) have shuffles that have nothing to do with each other.
        seeds = tf.random.stateless_uniform(
            [2, 2], tf.stack([tf.cast(config.seed, tf.int64), epoch]), 0, tf.int64.max, tf.int64
        )
        shards = _shards(split)
        if by_files:
            shards = shards.shard(pipelines, pipeline)
        shards = _shuffle(shards, len(split.paths), seeds[0])
        records = shards.interleave(
            _read_shard,
            cycle_length=_SHARDS_AT_ONCE,
            num_parallel_calls=_threads(config),
            deterministic=True,
        )
        records = _shuffle(records, config.shuffle_buffer, seeds[1])
        if not by_files:
            records = records.shard(pipelines, pipeline)
        # A worker whose shards hold less than its share starts over.
        records = records.repeat().take(steps * pipeline_batch_size)

        def identify(index: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            place = index * pipelines + pipeline
            return record, tf.stack([tf.cast(config.seed, tf.int64), epoch, place])

        seen = tf.where(epoch == first_epoch, tf.cast(seen_steps, tf.int64), 0)
        return records.enumerate().skip(seen * pipeline_batch_size).map(identify)

    epochs = tf.data.Dataset.range(first_epoch, tf.int64.max)
    records = epochs.flat_map(epoch_records)

    def read(record: tf.Tensor, identity: tf.Tensor) -> tuple[tf.Tensor, ...]:
        encoded, label = _parse(record, info)
        seed = tf.random.experimental.stateless_fold_in(
            tf.cast(identity[:2], tf.int32), tf.cast(identity[2], tf.int32)
        )
        crop_seed, colour_seed = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
        image = decode.training_image(encoded, crop_seed, config)
        return augment(image, colour_seed, config), label, 1.0

    dataset = _read_batches(records, read, batch_size, config, drop_remainder=True)
    # Keras and tf.distribute ask no worker whether it is at its end when they know that it is not.
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _evaluation_batches(
    info: DatasetInfo, config: Config, context: tf.distribute.InputContext, batch_size: int
) -> tf.data.Dataset:
    """Returns this pipeline's images in batches, and then batches of padding without end."""
    split = info.splits["validation"]
    pipelines, pipeline = context.num_input_pipelines, context.input_pipeline_id
    by_files = _by_files(split, config, pipelines)
    shards = _shards(split)
    if by_files:
        shards = shards.shard(pipelines, pipeline)
    records = shards.interleave(
        _read_shard,
        cycle_length=_SHARDS_AT_ONCE,
        num_parallel_calls=_threads(config),
        deterministic=True,
    )
    if not by_files:
        records = records.shard(pipelines, pipeline)

    def read(record: tf.Tensor) -> tuple[tf.Tensor, ...]:
        encoded, label = _parse(record, info)
        return decode.evaluation_image(encoded, config), label, 1.0

    padding = _unreadable(config, _PADDING)
    dataset = _read_batches(records, read, batch_size, config, drop_remainder=False).unbatch()
    dataset = dataset.concatenate(tf.data.Dataset.from_tensors(padding).repeat())
    return dataset.batch(batch_size, drop_remainder=True)


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


def _shards(split: SplitInfo) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        (list(split.paths), tf.constant(split.counts, tf.int64))
    )


def _read_shard(path: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Returns exactly ``count`` records of a shard; empty strings for those that are lost.

    TensorFlow leaves a file at its first corrupt record; those behind it are then salvaged.
    """

    def salvage(path: bytes) -> object:
        return salvage_records(path.decode())

    rest = tf.data.Dataset.from_generator(
        salvage, args=(path,), output_signature=tf.TensorSpec([], tf.string)
    )
    lost = tf.data.Dataset.from_tensors(b"").repeat()
    return (
        tf.data.TFRecordDataset(path)
        .ignore_errors(log_warning=True)
        .concatenate(rest)
        .concatenate(lost)
        .take(count)
    )


def _parse(record: tf.Tensor, info: DatasetInfo) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the encoded image and its class, checked against the number of classes."""
    features = tf.io.parse_single_example(
        record,
        {
            ENCODED: tf.io.FixedLenFeature([], tf.string),
            LABEL: tf.io.FixedLenFeature([], tf.int64),
        },
    )
    label = tf.cast(features[LABEL] + info.label_offset, tf.int32)
    tf.debugging.Assert(
        tf.logical_and(label >= 0, label < info.num_classes), ["label out of range:", label]
    )
    return features[ENCODED], label


def _unreadable(config: Config, label: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    size = config.image_size
    return tf.zeros([size, size, 3], tf.uint8), tf.constant(label, tf.int32), tf.constant(0.0)


def _read_batches(
    records: tf.data.Dataset, read: object, batch_size: int, config: Config, drop_remainder: bool
) -> tf.data.Dataset:
    """Applies ``read`` to records and batches the images; what cannot be read has weight 0."""

    def one_by_one(*record: tf.Tensor) -> tf.data.Dataset:
        image = tf.data.Dataset.from_tensors(record).map(read).ignore_errors()
        unreadable = tf.data.Dataset.from_tensors(_unreadable(config, label=0))
        return image.concatenate(unreadable).take(1)

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        size = tf.shape(records[0], tf.int64)[0]
        records = tf.data.Dataset.from_tensor_slices(records)
        # Whole or not at all: batching goes on behind an error, with the images that are left.
        fast = records.map(read).batch(size, drop_remainder=True).ignore_errors()
        careful = records.flat_map(one_by_one).batch(batch_size)
        return fast.concatenate(careful).take(1)

    batches = records.batch(batch_size, drop_remainder=drop_remainder).interleave(
        batch,
        cycle_length=_threads(config),
        num_parallel_calls=_threads(config),
        deterministic=True,
    )
    if not drop_remainder:
        return batches
    return batches.map(
        lambda *parts: tuple(tf.ensure_shape(part, [batch_size, *part.shape[1:]]) for part in parts)
    )


def _synthetic(config: Config, batch_size: int) -> tf.data.Dataset:
    """Returns one batch of random images, again and again, so that it costs nothing."""
    seed = [config.seed, 0]
    size = [batch_size, config.image_size, config.image_size, 3]
    images = tf.cast(tf.random.stateless_uniform(size, seed, 0, 256, tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform([batch_size], seed, 0, config.num_classes, tf.int32)
    batch = (images, labels, tf.ones([batch_size]))
    return tf.data.Dataset.from_tensors(batch).repeat()
