"""Steps of an epoch and of an evaluation, and the image size at each step."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.distribute.strategy import devices_of, replicas_each
from imagenet_fast.distribute.workers import worker_place, workers_of


def steps_per_epoch(info: DatasetInfo, options: DataOptions) -> int:
    """Returns the number of training steps in an epoch, without a partial last batch.

    Raises:
      UserError: if there is not a single full batch.
    """
    examples = info.splits["train"].examples
    if examples < options.batch_size:
        raise UserError(
            f"batch_size is {options.batch_size}, but {info.name} has only "
            f"{counted(examples, 'training image')}: give at most --batch_size={examples}"
        )
    return examples // options.batch_size


def training_image_size(options: DataOptions, step: int, steps_per_epoch: int) -> int:
    """Returns the height and width of training images at a training step."""
    for size, until in options.sizes_until:
        if step < until.steps(steps_per_epoch, options.batch_size):
            return size
    return options.image_size


def steps_by_size(options: DataOptions, steps_per_epoch: int, total: int) -> dict[int, int]:
    """Returns the number of training steps with each image size, of ``total`` steps."""
    steps = dict.fromkeys([*(size for size, _ in options.sizes_until), options.image_size], 0)
    begin = 0
    for size, until in options.sizes_until:
        end = min(until.steps(steps_per_epoch, options.batch_size), total)
        steps[size] += end - begin
        begin = end
    steps[options.image_size] += total - begin
    return steps


def evaluation_steps(
    info: DatasetInfo,
    options: DataOptions,
    strategy: tf.distribute.Strategy,
    split: str = "validation",
) -> int:
    """Returns the number of steps in which all workers evaluate all their images of a split."""
    examples = info.splits[split].examples
    size = evaluation_batch_size(options, strategy, examples)
    return -(-_most_images(strategy, examples) // size)


def evaluation_batch_size(
    options: DataOptions, strategy: tf.distribute.Strategy, examples: int
) -> int:
    """Returns the images of a replica's batch: no more than there are."""
    parts = options.accumulation_steps * replicas_each(options, strategy)
    size = options.eval_batch_size or options.batch_size // parts
    size = -(-size // strategy.num_replicas_in_sync)
    return min(size, _most_images(strategy, examples))


def _most_images(strategy: tf.distribute.Strategy, examples: int) -> int:
    """Returns the largest number of a split's images that a replica gets."""
    pipelines = input_pipelines(strategy)
    replicas = strategy.num_replicas_in_sync // pipelines
    return -(-examples // (pipelines * replicas))


def input_pipelines(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of hosts with replicas, each of which has an input pipeline."""
    if workers_of(strategy) is not None:
        # A process sees only its own devices.
        return worker_place(strategy)[0]
    devices = map(tf.DeviceSpec.from_string, devices_of(strategy))
    return len({device.task for device in devices})
