"""The tf.data graph: from shards to batches of uint8 images, in an order that can be repeated.

Training reads records in the order of ``order.py`` and makes images of them as ``batches.py`` says.
Both are functions of (seed, epoch, step), so that nothing has to be saved to continue.

A batch is ``(images, labels, weights)``: uint8 [batch, size, size, 3], int32 [batch] and float32
[batch]. The weight is 1; 0 marks an image that could not be read, whose place is kept so that
shapes and positions stay what they are. Label -1 marks padding, which only evaluation has.
"""

from __future__ import annotations

import functools
import os

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data.bad_images import list_bad_images
from imagenet_fast.data.batches import evaluation_batches, training_batches, unreadable
from imagenet_fast.data.cache import (
    batches_from_memory,
    copy_shards,
    read_indices,
    records_from_memory,
)
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.order import is_by_files, read_records, share_of, training_order
from imagenet_fast.distribute.strategy import make_strategy, per_replica_batch_size
from imagenet_fast.errors import UserError

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
      first_step: the weight update that the first training batch is for. With ``train_sizes``, the
        images have the size that belongs to it, also those of later steps.

    Raises:
      UserError: if there is no such split, or the data cannot be used.
    """
    info = read_info(config)
    if split not in info.splits:
        raise UserError(f"{info.name} has no {split} split, only {', '.join(info.splits)}")
    strategy = make_strategy(config)
    if split == "train":
        size = training_image_size(config, first_step, steps_per_epoch(info, config))
        config = config.replace(image_size=size, train_sizes=(), train_until=())

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
        # Each worker has taken its share already.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.prefetch(_BATCHES_AHEAD * replicas).with_options(options)
        return with_threads(dataset, thread_count(config))

    return strategy.distribute_datasets_from_function(batches)


def steps_per_epoch(info: DatasetInfo, config: Config) -> int:
    """Returns the weight updates of an epoch; what does not fill a batch waits for the next."""
    return info.splits["train"].examples // config.batch_size


def training_image_size(config: Config, step: int, steps_per_epoch: int) -> int:
    """Returns the height and width of training images at a weight update."""
    for size, until in zip(config.train_sizes, config.train_until):
        if step < until.steps(steps_per_epoch, config.batch_size):
            return size
    return config.image_size


def evaluation_steps(info: DatasetInfo, config: Config, strategy: tf.distribute.Strategy) -> int:
    """Returns the steps in which all workers have seen all their validation images."""
    split = info.splits["validation"]
    pipelines = _input_pipelines(strategy)
    if is_by_files(split, config, pipelines):
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


def thread_count(config: Config) -> int:
    """Returns the threads that read and decode in each process."""
    return config.data_threads or os.cpu_count() or 1


def with_threads(dataset: tf.data.Dataset, threads: int) -> tf.data.Dataset:
    """Returns the dataset with so many threads of its own and nothing that tunes itself."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    # There is nothing to tune, and an iterator can wait for the tuner half a minute to end.
    options.autotune.enabled = False
    return dataset.with_options(options)


def _training_batches(
    info: DatasetInfo,
    config: Config,
    context: tf.distribute.InputContext,
    batch_size: int,
    pipeline_batch_size: int,
    first_step: int,
) -> tf.data.Dataset:
    share = share_of(
        info.splits["train"], config, context.num_input_pipelines, context.input_pipeline_id
    )
    bad_images = list_bad_images(config, info, "train", context.input_pipeline_id)
    threads = thread_count(config)
    if config.cache_dir:
        share = copy_shards(share, config.cache_dir)
    read = functools.partial(read_records, bad_images=bad_images)
    order = training_order(
        share,
        read if config.cache == "none" else read_indices,
        config,
        batch_size=batch_size,
        images_per_step=pipeline_batch_size,
        steps_per_epoch=steps_per_epoch(info, config),
        first_step=first_step,
        threads=threads,
    )
    if config.cache == "decoded":
        dataset = batches_from_memory(order, share, config, threads, bad_images)
    else:
        if config.cache == "encoded":
            order = records_from_memory(order, share, threads, bad_images)
        dataset = training_batches(order, info, config, threads, bad_images)
    # Keras and tf.distribute ask no worker whether it is at its end when they know that it is not.
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _evaluation_batches(
    info: DatasetInfo, config: Config, context: tf.distribute.InputContext, batch_size: int
) -> tf.data.Dataset:
    """Returns this pipeline's images in batches, and then batches of padding without end."""
    share = share_of(
        info.splits["validation"], config, context.num_input_pipelines, context.input_pipeline_id
    )
    bad_images = list_bad_images(config, info, "validation", context.input_pipeline_id)
    threads = thread_count(config)
    read = functools.partial(read_records, bad_images=bad_images)
    records = share.own(share.interleave(share.shards(), read, threads)).batch(batch_size)
    images = evaluation_batches(records, info, config, threads, bad_images).unbatch()
    padding = tf.data.Dataset.from_tensors(unreadable(config, _PADDING)).repeat()
    return images.concatenate(padding).batch(batch_size, drop_remainder=True)


def _synthetic(config: Config, batch_size: int) -> tf.data.Dataset:
    """Returns one batch of random images, again and again, so that it costs nothing."""
    seed = [config.seed, 0]
    size = [batch_size, config.image_size, config.image_size, 3]
    images = tf.cast(tf.random.stateless_uniform(size, seed, 0, 256, tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform([batch_size], seed, 0, config.num_classes, tf.int32)
    batch = (images, labels, tf.ones([batch_size]))
    return tf.data.Dataset.from_tensors(batch).repeat()
