"""A few training images as the model sees them: cropped, changed, mixed."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data.batches import training_batches
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.order import part_of, training_order
from imagenet_fast.data.pipeline import (
    steps_per_epoch,
    thread_count,
    training_image_size,
    with_threads,
)
from imagenet_fast.data.resize_op import with_resize_kernel
from imagenet_fast.data.shards import read_shard
from imagenet_fast.training.mix import Mixer

_IMAGES = 32
# Enough to mix the classes of shards that are not; training's own buffer may take minutes to fill.
_SHUFFLED = 512


@dataclasses.dataclass(frozen=True)
class InputImages:
    """Images that were made as a training batch is.

    Attributes:
      images: uint8 [images, size, size, 3].
      labels: int32 [images], classes of the images.
      partners: int32 [images], classes of what was mixed in.
      shares: float32 [images], of the own class in the loss; 1 where nothing was mixed in.
    """

    images: np.ndarray
    labels: np.ndarray
    partners: np.ndarray
    shares: np.ndarray


@tf.autograph.experimental.do_not_convert
def make_input_images(
    config: Config, info: DatasetInfo, mixer: Mixer | None, step: int
) -> InputImages:
    """Makes some images as the training pipeline does, but in a pipeline of their own.

    So nothing is taken from training, whose order stays what it is, and nothing has to wait for
    its shuffle buffer or its cache to fill. Images that cannot be read are left out.

    Args:
      config: says how images are made.
      info: of the data, which is not synthetic.
      mixer: mixes them; None: they are not mixed.
      step: the weight update at whose size and with whose random numbers they are made.

    Raises:
      tf.errors.OpError: if a shard cannot be read.
    """
    split = info.splits["train"]
    count = min(_IMAGES, split.examples)
    size = training_image_size(config, step, steps_per_epoch(info, config))
    config = with_resize_kernel(
        config.replace(
            image_size=size,
            train_sizes=(),
            train_until=(),
            data_on_device=False,
            augment_in_groups=False,
            alternating_flip=False,
            shuffle_buffer=min(config.shuffle_buffer, _SHUFFLED),
        )
    )
    threads = thread_count(config)
    order = training_order(
        part_of(split, config, pipelines=1, pipeline=0),
        read_shard,
        config,
        batch_size=count,
        images_per_step=count,
        steps_per_epoch=1,
        first_step=0,
        threads=threads,
    )
    batches = with_threads(training_batches(order.take(1), info, config, threads), threads)
    images, labels, weights = batches.get_single_element()
    partners, shares = labels, tf.ones_like(weights)
    if mixer is not None:
        numbers = mixer.draw(count, step, 0)
        images, partners, shares = mixer.mix(images, labels, weights, numbers)
    whole = weights.numpy() > 0
    return InputImages(*(part.numpy()[whole] for part in (images, labels, partners, shares)))
