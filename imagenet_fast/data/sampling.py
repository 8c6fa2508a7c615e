"""How often training reads each image in an epoch, so that classes have given shares.

An epoch has as many images as without it. Those of a class are read equally often, but for a
remainder, which is drawn anew in each epoch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_path
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data.class_values import BALANCED, read_class_values
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.metadata import read_classes
from imagenet_fast.data.options import DataOptions

# The keys of random numbers: of the classes' rounding, and of the images of a remainder.
_ROUNDING, _REMAINDER = 0, 1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws the images of an epoch."""

    classes: np.ndarray  # of each training image, int32 [images], in the order of the shards
    shares: np.ndarray  # of each class in an epoch, float64 [classes], which add up to 1
    seed: int  # of the random numbers

    def copies(self, epoch: tf.Tensor, total: int) -> tf.Tensor:
        """Returns how often each image is read in an epoch, int64 [images], ``total`` in all."""
        run = tf.random.stateless_uniform(
            [2, 2], tf.stack([tf.constant(self.seed, tf.int64), epoch]), 0, tf.int64.max, tf.int64
        )
        # Differences of rounded sums: each class has its share, but for 1, and their sum is right.
        start = tf.random.stateless_uniform([], run[_ROUNDING], dtype=tf.float64)
        sums = np.cumsum([0, *self.shares])
        ends = tf.cast(tf.floor(tf.constant(total * (sums / sums[-1])) + start), tf.int64)
        drawn = ends[1:] - ends[:-1]
        images = tf.constant(np.bincount(self.classes, minlength=len(self.shares)), tf.int64)
        each, rest = drawn // tf.maximum(images, 1), drawn % tf.maximum(images, 1)
        # The places of images among those of their class, in an order drawn at random.
        keys = tf.random.stateless_uniform([len(self.classes)], run[_REMAINDER], dtype=tf.float64)
        shuffled = tf.argsort(keys)
        by_class = tf.gather(shuffled, tf.argsort(tf.gather(self.classes, shuffled), stable=True))
        firsts = tf.gather(tf.cumsum(images, exclusive=True), tf.gather(self.classes, by_class))
        places = tf.range(len(self.classes), dtype=tf.int64) - firsts
        places = tf.scatter_nd(by_class[:, tf.newaxis], places, [len(self.classes)])
        more = tf.cast(places < tf.gather(rest, self.classes), tf.int64)
        return tf.gather(each, self.classes) + more


def make_sampling(options: DataOptions, info: DatasetInfo) -> Sampling | None:
    """Returns how images are drawn; None: each is read once an epoch.

    Raises:
      UserError: as :func:`class_shares`.
    """
    shares = class_shares(options, info)
    if shares is None:
        return None
    directory = to_path(options.data_dir)
    classes = read_classes(manifests.read_manifest(directory), "train", directory)
    return Sampling(classes.astype(np.int32), shares, options.seed)


def class_shares(options: DataOptions, info: DatasetInfo) -> np.ndarray | None:
    """Returns each class's share of an epoch, float64 [classes]; None: that of its images.

    Raises:
      UserError: if the data has no manifest, or a class that is to be drawn has no image.
    """
    if not options.sampling:
        return None
    if info.multi_label:
        raise UserError(
            f"sampling={options.sampling} draws each image by its class, but images of {info.name} "
            "have several labels: leave it out; class_weights weights classes in the loss"
        )
    counts = info.splits["train"].class_counts
    if not counts:
        raise UserError(
            f"sampling={options.sampling} needs to know each image's class: prepare the data with "
            "`imagenet-fast prepare`"
        )
    shares = np.ones(info.num_classes)
    if options.sampling != BALANCED:
        shares = read_class_values("sampling", options.sampling, info.labels)
    for label, count, share in zip(info.labels, counts, shares):
        if share and not count:
            raise UserError(
                f"sampling={options.sampling}: class {label!r} has no training image to draw: give "
                f'a file with 0 for it, {{"{label}": 0}}, as --sampling=FILE'
            )
    return shares / shares.sum()
