"""Patch-whitening filters of a network's first layer, computed from training images."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.batches import evaluation_batches
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.order import part_of, part_reader
from imagenet_fast.data.pipeline import thread_count, with_threads
from imagenet_fast.data.resize_op import with_resize_kernel
from imagenet_fast.data.shards import read_shard
from imagenet_fast.layers import PatchWhitening, PixelNormalization

_AT_ONCE = 256


def whiten(network: keras.Model, config: Config, info: DatasetInfo) -> None:
    """Sets the filters of a network's ``PatchWhitening``, if it has one.

    To be called outside of replicas, by all workers: each reads the same images.

    Args:
      network: as ``models.build`` makes it.
      config: says how images are prepared and how many of the first ones are taken.
      info: of the data.

    Raises:
      UserError: if none of them can be read.
    """
    for layer in network.layers:
        if isinstance(layer, PatchWhitening):
            layer.adapt(_first_images(config, info))


@tf.autograph.experimental.do_not_convert
def _first_images(config: Config, info: DatasetInfo) -> np.ndarray:
    """Returns normalized training images, float32 [images, image_size, image_size, 3]."""
    if config.synthetic:
        shape = [min(_AT_ONCE, config.whitening_images), config.image_size, config.image_size, 3]
        pixels = np.random.default_rng(config.seed).integers(0, 256, shape, np.uint8)
    else:
        config = with_resize_kernel(config)
        threads = thread_count(config)
        part = part_of(info.splits["train"], config.replace(shard_by="records"), 1, 0)
        records = part.shards().flat_map(part_reader(read_shard)).take(config.whitening_images)
        batches = evaluation_batches(records.batch(_AT_ONCE), info, config, threads)
        parts = [
            images.numpy()[weights.numpy() > 0]
            for images, _, weights in with_threads(batches, threads)
        ]
        pixels = np.concatenate(parts)
        if not len(pixels):
            raise UserError(
                f"none of the first {config.whitening_images} training images can be read, from "
                "which whitening filters are made"
            )
    normalize = PixelNormalization(config.pixel_mean, config.pixel_std, dtype=tf.float32)
    return normalize(pixels).numpy()
