"""The tf.data graph: from shards to batches of uint8 images, in an order that can be repeated.

Training reads records in the order of ``order.py`` and makes images of them as ``batches.py`` says.
Both are functions of (seed, epoch, step), so that nothing has to be saved to continue.

A batch is ``(images, labels, weights)``: uint8 [batch, size, size, 3], int32 [batch] and float32
[batch]. The weight is 1; 0 marks an image that could not be read, whose place is kept so that
shapes and positions stay what they are. Label -1 marks padding, which only evaluation has.

With ``data_on_device`` the devices make their batches themselves. All that comes from here is then
``{"step": ...}``, int64, the number of the weight update, or of the step of evaluation.

Pipelines that run in other processes, on the hosts of a TPU slice or on input servers, are made
without this one's Python functions: their batches are the same, but what cannot be read is not
listed in a file.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import to_path
from imagenet_fast.data.bad_images import BadImages, list_bad_images
from imagenet_fast.data.batches import PADDING, evaluation_batches, training_batches, unreadable
from imagenet_fast.data.cache import (
    batches_from_memory,
    copy_shards,
    read_indices,
    records_from_memory,
)
from imagenet_fast.data.decode import resize
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.malloc import keep_freed_memory
from imagenet_fast.data.on_device import ImagesOnDevice, TrainingImages, ValidationImages
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.order import SplitPart, part_of, training_order
from imagenet_fast.data.resize_op import with_resize_kernel
from imagenet_fast.data.service import (
    batches_from_servers,
    can_watch,
    check_servers,
    servers_of,
)
from imagenet_fast.data.shards import read_shard
from imagenet_fast.distribute.strategy import (
    devices_of,
    make_strategy,
    per_replica_batch_size,
)
from imagenet_fast.distribute.workers import is_chief, worker_place, workers_of

# For each replica, ready while it computes.
_BATCHES_AHEAD = 2


# AutoGraph would find nothing to convert, and look for it longer than tracing takes.
@tf.autograph.experimental.do_not_convert
def make_dataset(
    config: InputOptions, split: str, first_step: int = 0
) -> tf.distribute.DistributedDataset:
    """Returns the batches of a split, for ``model.fit`` or ``model.evaluate``.

    Args:
      config: names the data and says how to read it.
      split: ``train``: endless, epoch after epoch; or ``validation`` or ``test``: each image
        once, padded to whole batches, as many as the result's ``evaluation_steps`` tells.
      first_step: the weight update that the first training batch is for. With ``train_sizes``, the
        images have the size that belongs to it, also those of later steps.

    Raises:
      UserError: if there is no such split, the data cannot be used, an input server is not there,
        or an option needs this process where the pipelines run in others.
    """
    info = read_info(config)
    if split not in info.splits:
        raise UserError(f"{info.name} has no {split} split, only {', '.join(info.splits)}")
    if config.data_on_device and split == "test":
        raise UserError(
            "data_on_device is for training and validation: read the test split without it, as "
            "`imagenet-fast evaluate --split=test` does"
        )
    strategy = make_strategy(config)
    here = _runs_here(strategy)
    keep_freed_memory()
    config = with_resize_kernel(config) if here else _for_tpu_hosts(config)
    if not config.synthetic and not config.data_on_device:
        _tell_without_python(config, split, here)
    if split == "train":
        size = training_image_size(config, first_step, steps_per_epoch(info, config))
        config = config.replace(image_size=size, train_sizes=(), train_until=())

    else:
        steps = evaluation_steps(info, config, strategy, split)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = strategy.num_replicas_in_sync // context.num_input_pipelines
        if config.synthetic:
            dataset = _synthetic(config, per_replica_batch_size(config, strategy))
        elif config.data_on_device and split == "train":
            dataset = _step_numbers(replicas, first_step)
        elif config.data_on_device:
            dataset = _step_numbers(replicas, 0).take(steps * replicas)
        elif split == "train":
            size = per_replica_batch_size(config, strategy)
            dataset = _training_batches(
                info, config, context, size, size * replicas, first_step, here
            )
        else:
            size = _evaluation_batch_size(config, strategy)
            dataset = _evaluation_batches(info, config, context, size, split, here)
            dataset = dataset.take(steps * replicas)
        sharding = tf.data.Options()
        # Each worker has taken its part already.
        sharding.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        dataset = dataset.prefetch(_BATCHES_AHEAD * replicas).with_options(sharding)
        return with_threads(dataset, thread_count(config))

    dataset = strategy.distribute_datasets_from_function(batches)
    if split != "train":
        # For Classifier.evaluate: Keras cannot ask a distributed data set how long it is.
        dataset.evaluation_steps = steps
    return dataset


@tf.autograph.experimental.do_not_convert
def make_images_on_device(options: InputOptions, split: str) -> ImagesOnDevice:
    """Returns the images of a split, for a model that makes its batches itself.

    To be called outside of the strategy's scope.

    Args:
      options: names the data and says how images are prepared and changed.
      split: ``train`` or ``validation``.

    Raises:
      UserError: if the data cannot be used.
    """
    keep_freed_memory()
    info, strategy = read_info(options), make_strategy(options)
    kind, batch_size = {
        "train": (TrainingImages, per_replica_batch_size),
        "validation": (ValidationImages, _evaluation_batch_size),
    }[split]
    return kind(
        info,
        split,
        with_resize_kernel(options),
        batch_size=batch_size(options, strategy),
        strategy=strategy,
        threads=thread_count(options),
        # All hosts read the same images.
        bad_images=list_bad_images(options, info, split, 0) if is_chief(strategy) else None,
    )


def steps_per_epoch(info: DatasetInfo, options: InputOptions) -> int:
    """Returns the weight updates of an epoch; what does not fill a batch waits for the next.

    Raises:
      UserError: if there is not a single one.
    """
    examples = info.splits["train"].examples
    if examples < options.batch_size:
        raise UserError(
            f"batch_size {options.batch_size} is more than the {examples} training images of "
            f"{info.name}; give at most --batch_size={examples}"
        )
    return examples // options.batch_size


def training_image_size(options: InputOptions, step: int, steps_per_epoch: int) -> int:
    """Returns the height and width of training images at a weight update."""
    for size, until in zip(options.train_sizes, options.train_until):
        if step < until.steps(steps_per_epoch, options.batch_size):
            return size
    return options.image_size


def evaluation_steps(
    info: DatasetInfo,
    options: InputOptions,
    strategy: tf.distribute.Strategy,
    split: str = "validation",
) -> int:
    """Returns the steps in which all workers have seen all their images of a split."""
    pipelines = _input_pipelines(strategy)
    most = -(-info.splits[split].examples // pipelines)
    replicas = strategy.num_replicas_in_sync // pipelines
    return -(-most // (_evaluation_batch_size(options, strategy) * replicas))


def _evaluation_batch_size(options: InputOptions, strategy: tf.distribute.Strategy) -> int:
    size = options.eval_batch_size or options.batch_size // options.accumulation_steps
    return -(-size // strategy.num_replicas_in_sync)


def _input_pipelines(strategy: tf.distribute.Strategy) -> int:
    """Returns how many hosts feed the replicas, each from a pipeline of its own."""
    if workers_of(strategy) is not None:
        # A process sees its own devices only.
        return worker_place(strategy)[0]
    devices = map(tf.DeviceSpec.from_string, devices_of(strategy))
    return len({device.task for device in devices})


def _runs_here(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the input pipelines run in this process.

    That of a TPU slice's user is not among its hosts, to which it sends the pipelines' graphs.
    """
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return True
    devices = map(tf.DeviceSpec.from_string, devices_of(strategy))
    return all(device.job == "localhost" for device in devices)


def _for_tpu_hosts(options: InputOptions) -> InputOptions:
    """Returns the configuration with the ``resize_kernel`` that the hosts of a TPU slice have.

    Raises:
      UserError: if the native one is asked for.
    """
    if options.resize_kernel == "native":
        raise UserError(
            "resize_kernel=native is unavailable on the hosts of a TPU slice: use "
            "--resize_kernel=auto or tensorflow"
        )
    return options.replace(resize_kernel="tensorflow")


def _tell_without_python(options: InputOptions, split: str, here: bool) -> None:
    """Tells what is different where a split's pipelines run in other processes; else nothing.

    Raises:
      UserError: if an option keeps data where they cannot have it.
    """
    served = split == "train" and bool(options.input_servers)
    if here and not served:
        return
    where = "input servers" if served else "the hosts of the TPU slice"
    kept = {"cache": options.cache != "none", "cache_dir": bool(options.cache_dir)}
    for name, given in kept.items():
        if given and split == "train":
            raise UserError(
                f"{name}={getattr(options, name)} keeps training images with the process that "
                f"trains, but they are read on {where}: leave it out"
            )
    warn_once(
        f"{split} images are read on {where}, without Python: those that cannot be read are "
        "counted, but not listed; `imagenet-fast prepare --verify` names the damaged records"
    )


def thread_count(options: InputOptions) -> int:
    """Returns the threads that read and decode in each process."""
    return options.data_threads or cpu_cores()


def with_threads(dataset: tf.data.Dataset, threads: int) -> tf.data.Dataset:
    """Returns the dataset with so many threads of its own and nothing that tunes itself."""
    threading = tf.data.Options()
    threading.threading.private_threadpool_size = threads
    # There is nothing to tune, and an iterator can wait for the tuner half a minute to end.
    threading.autotune.enabled = False
    return dataset.with_options(threading)


def _training_batches(
    info: DatasetInfo,
    options: InputOptions,
    context: tf.distribute.InputContext,
    batch_size: int,
    pipeline_batch_size: int,
    first_step: int,
    here: bool,
) -> tf.data.Dataset:
    with_python = here and not options.input_servers
    part, bad_images = _part(info, options, context, "train", with_python)
    threads = thread_count(options)
    if options.cache_dir:
        part = copy_shards(part, options.cache_dir)
    order = training_order(
        part,
        read_shard if options.cache == "none" else read_indices,
        options,
        batch_size=batch_size,
        images_per_step=pipeline_batch_size,
        steps_per_epoch=steps_per_epoch(info, options),
        first_step=first_step,
        threads=threads,
    )
    if options.cache == "decoded":
        dataset = batches_from_memory(order, part, options, threads, bad_images)
    else:
        if options.cache == "encoded":
            order = records_from_memory(order, part, options, threads)

        def make(order: tf.data.Dataset) -> tf.data.Dataset:
            return training_batches(order, info, options, threads, bad_images, with_python)

        if options.input_servers:
            servers = servers_of(
                options.input_servers, context.num_input_pipelines, context.input_pipeline_id
            )
            check_servers(servers, functools.partial(_trial, part.paths[0], options))
            watched = here and can_watch()
            if not watched:
                warn_once("an input server that goes away will not be noticed, but waited for")
            dataset = batches_from_servers(
                order, lambda order: with_threads(make(order), threads), servers, watched
            )
        else:
            dataset = make(order)
    # Keras and tf.distribute ask no worker whether it is at its end when they know that it is not.
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _part(
    info: DatasetInfo,
    options: InputOptions,
    context: tf.distribute.InputContext,
    split: str,
    with_python: bool,
) -> tuple[SplitPart, BadImages | None]:
    """Returns what a pipeline reads, and where it lists what it cannot read."""
    pipelines, pipeline = context.num_input_pipelines, context.input_pipeline_id
    part = part_of(info.splits[split], options, pipelines, pipeline)
    if with_python:
        return part, list_bad_images(options, info, split, pipeline)
    # Other processes have other working directories.
    paths = tuple(str(to_path(path).absolute()) for path in part.paths)
    return dataclasses.replace(part, paths=paths), None


def _trial(path: str, options: InputOptions) -> tf.data.Dataset:
    """Returns a dataset of one element that takes what an input server may lack."""
    opened = tf.data.FixedLengthRecordDataset(path, record_bytes=1).take(1)
    return opened.map(lambda _: resize(tf.zeros([1, 1, 3], tf.uint8), options))


def _evaluation_batches(
    info: DatasetInfo,
    options: InputOptions,
    context: tf.distribute.InputContext,
    batch_size: int,
    split: str,
    here: bool,
) -> tf.data.Dataset:
    """Returns this pipeline's images in batches, and then batches of padding without end."""
    part, bad_images = _part(info, options, context, split, with_python=here)
    threads = thread_count(options)
    records = part.select(part.interleave(part.shards(), read_shard, threads)).batch(batch_size)
    images = evaluation_batches(records, info, options, threads, bad_images, here).unbatch()
    padding = tf.data.Dataset.from_tensors(unreadable(options, PADDING)).repeat()
    return images.concatenate(padding).batch(batch_size, drop_remainder=True)


def _step_numbers(replicas: int, first_step: int) -> tf.data.Dataset:
    """Returns the numbers of the steps from the first one on, each for so many replicas."""
    numbers = tf.data.Dataset.range(first_step * replicas, tf.int64.max)
    dataset = numbers.map(lambda number: {"step": number // replicas})
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _synthetic(options: InputOptions, batch_size: int) -> tf.data.Dataset:
    """Returns one batch of random images, again and again, so that it costs nothing."""
    seed = [options.seed, 0]
    size = [batch_size, options.image_size, options.image_size, 3]
    images = tf.cast(tf.random.stateless_uniform(size, seed, 0, 256, tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform([batch_size], seed, 0, options.num_classes, tf.int32)
    batch = (images, labels, tf.ones([batch_size]))
    return tf.data.Dataset.from_tensors(batch).repeat()
