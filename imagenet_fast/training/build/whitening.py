"""Patch-whitening filters of a network's first layer, computed from training images."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.batches import evaluation_batches
from imagenet_fast.data.dataset import thread_count, with_threads
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.order import part_of, part_reader
from imagenet_fast.data.shards import shard_reader
from imagenet_fast.layers import PatchWhitening, PixelNormalization
from imagenet_fast.training.run import Run

_BATCH = 256


def whiten(network: keras.Model, run: Run) -> None:
    """Sets the filters of a network's ``PatchWhitening``, if any, by the first training images.

    To be called outside of replicas, by all workers: each reads the same images.

    Raises:
      UserError: if none of them can be read.
    """
    for layer in network.layers:
        if isinstance(layer, PatchWhitening):
            layer.adapt(_first_images(run.config, run.info, run.config.whitening_images))


@tf.autograph.experimental.do_not_convert
def _first_images(options: InputOptions, info: DatasetInfo, count: int) -> np.ndarray:
    """Returns normalized training images, float32 [images, image_size, image_size, 3]."""
    if options.synthetic:
        shape = [min(_BATCH, count), options.image_size, options.image_size, 3]
        pixels = np.random.default_rng(options.seed).integers(0, 256, shape, np.uint8)
    else:
        options = with_resize_kernel(options)
        threads = thread_count(options)
        part = part_of(info.splits["train"], options.replace(shard_by="records"), 1, 0)
        records = part.shards().flat_map(part_reader(shard_reader(part.paths))).take(count)
        batches = evaluation_batches(records.batch(_BATCH), info, options, threads)
        parts = [
            images.numpy()[weights.numpy() > 0]
            for images, _, weights in with_threads(batches, threads)
        ]
        pixels = np.concatenate(parts)
        if not len(pixels):
            raise UserError(
                f"whitening needs training images, but none of the first {count} can be read"
            )
    normalize = PixelNormalization(options.pixel_mean, options.pixel_std, dtype=tf.float32)
    return normalize(pixels).numpy()
