"""A few training images as the model sees them: cropped, augmented, mixed."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from imagenet_fast.data.batches import training_batches
from imagenet_fast.data.dataset import thread_count, with_threads
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.order import Share, part_of, training_order
from imagenet_fast.data.shards import shard_reader
from imagenet_fast.data.steps import training_image_size
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.mix import Mixer

_IMAGES = 32
# Enough to mix classes of unshuffled shards; training's buffer may take minutes to fill.
_SHUFFLE_BUFFER = 512


@dataclasses.dataclass(frozen=True)
class InputImages:
    """Images prepared like a training batch.

    Attributes:
      images: uint8 [images, size, size, 3].
      labels: int32 [images], classes of the images.
      partners: int32 [images], classes of the images mixed in.
      shares: float32 [images], weight of ``labels`` in the loss; 1: nothing was mixed in.
    """

    images: np.ndarray
    labels: np.ndarray
    partners: np.ndarray
    shares: np.ndarray


@tf.autograph.experimental.do_not_convert
def make_input_images(run: Run, mixer: Mixer | None, step: int) -> InputImages:
    """Makes some images like the training pipeline, but in a separate pipeline.

    This leaves training's order as it is, and does not wait for its shuffle buffer or cache to
    fill. Unreadable images are skipped.

    Args:
      run: the run, whose data is not synthetic.
      mixer: mixes them; None: they are not mixed.
      step: the weight update whose image size and random numbers are used.

    Raises:
      tf.errors.OpError: if a shard cannot be read.
    """
    info, split = run.info, run.info.splits["train"]
    count = min(_IMAGES, split.examples)
    size = training_image_size(run.config, step, run.steps_per_epoch)
    options = with_resize_kernel(
        run.config.with_image_size(size).replace(
            data_on_device=False,
            augment_in_groups=False,
            alternating_flip=False,
            shuffle_buffer=min(run.config.shuffle_buffer, _SHUFFLE_BUFFER),
        )
    )
    threads = thread_count(options)
    order = training_order(
        Share(part_of(split, options, pipelines=1, pipeline=0), count, count, (0, 1)),
        shard_reader(split.paths),
        options,
        steps_per_epoch=1,
        first_step=0,
        threads=threads,
    )
    batches = with_threads(training_batches(order.take(1), info, options, threads), threads)
    images, labels, weights = batches.get_single_element()
    partners, shares = labels, tf.ones_like(weights)
    if mixer is not None:
        numbers = mixer.draw(count, step, 0)
        images, partners, shares = mixer.mix(images, labels, weights, numbers)
    readable = weights.numpy() > 0
    return InputImages(*(part.numpy()[readable] for part in (images, labels, partners, shares)))
