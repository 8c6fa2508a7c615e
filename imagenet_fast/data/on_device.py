"""Data sets in the memory of each accelerator, which also shuffles and augments them.

For data sets like CIFAR-10, 150 MB, which accelerators can train on faster than a host can
preprocess images (Page 2019, "How to Train Your ResNet"). A training step's only input is its
number: the images and their augmentation are functions of (seed, epoch, step), as on the host.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data.augmentation import stateless_random
from imagenet_fast.data.augmentation.augment import (
    Changes,
    change_light,
    cut_out,
    draw_changes,
    draw_flips,
    draw_light,
)
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.batches import PADDING
from imagenet_fast.data.cache import images_of
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.order import part_of

# The largest number of groups of images with the same augmentation in an epoch (Page 2019).
_MAX_GROUPS = 200

Batch = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class ImagesOnDevice:
    """The images of a split, in the memory of each device.

    Create it outside of the strategy's scope. It is not a ``tf.Module``, because Keras would track
    its variables as weights of the model.

    Args:
      info, options: the data set, and the preprocessing and augmentation of its images.
      split: ``train`` or ``validation``.
      batch_size: number of images in a batch; each replica makes one batch per step.
      strategy: of the replicas.
      threads: number of threads that decode.
      bad_images: lists unreadable images.
    """

    def __init__(
        self,
        info: DatasetInfo,
        split: str,
        options: DataOptions,
        *,
        batch_size: int,
        strategy: tf.distribute.Strategy,
        threads: int,
        bad_images: BadImages | None = None,
    ) -> None:
        self._options = options
        self._batch_size = batch_size
        self._replicas = strategy.num_replicas_in_sync
        self._count = info.splits[split].examples
        part = part_of(info.splits[split], options, pipelines=1, pipeline=0)
        images, labels, weights = images_of(part, split, options, threads, bad_images)
        # TensorFlow places int32 variables in the host's memory.
        parts = {"images": images, "labels": tf.cast(labels, tf.int64), "weights": weights}

        def make() -> list[tf.Variable]:
            return [
                tf.Variable(part, trainable=False, name=f"{split}_{name}")
                for name, part in parts.items()
            ]

        # The variables of each replica of this process, or one list that the strategy mirrors.
        self._copies: list[list[tf.Variable]] = []
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            # Mirrored variables would be broadcast by the first worker, which uint8 does not allow.
            for device in strategy.extended.worker_devices:
                with tf.device(device):
                    self._copies.append(make())
        else:
            with strategy.scope():
                self._copies.append(make())

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's batch of a step; call it in the replica's context.

        Args:
          step: number of the step, int64, from 0.
          replica: index of the replica among all.

        Returns:
          Images, uint8 [batch_size, image_size, image_size, 3], labels, int32 [batch_size] (of
          multi-label data [batch_size, classes]), and weights, float32 [batch_size], which are 0
          for unreadable images.
        """
        raise NotImplementedError

    def _places(self, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
        """Returns the positions of a replica's images in the epoch, int64 [batch_size]."""
        batch = step * self._replicas + tf.cast(replica, tf.int64)
        return batch * self._batch_size + tf.range(self._batch_size, dtype=tf.int64)

    def _gather(self, indices: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        local = 0
        if len(self._copies) > 1:
            # Each replica is traced separately, so its index is a constant.
            local = int(tf.get_static_value(tf.convert_to_tensor(replica))) % len(self._copies)
        images, labels, weights = (tf.gather(part, indices) for part in self._copies[local])
        return images, tf.cast(labels, tf.int32), weights


class TrainingImages(ImagesOnDevice):
    """Batches of training images, shuffled and augmented anew in each epoch.

    The last images of an epoch that do not fill a batch on all replicas are dropped.
    """

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's batch of a training step; see :class:`ImagesOnDevice`."""
        options = self._options
        global_batch = self._batch_size * self._replicas
        steps_per_epoch = self._count // global_batch
        epoch = step // steps_per_epoch
        places = self._places(step % steps_per_epoch, replica)
        indices = stateless_random.permuted(places, self._count, options.seed, epoch, "order")
        identities = _identities(options.seed, epoch, places)
        if options.augment_in_groups:
            changes = draw_in_groups(places, steps_per_epoch * global_batch, epoch, options)
            if options.brightness or options.contrast:
                changes["light"] = draw_light(identities, options)
        else:
            changes = draw_changes(identities, options)
        if options.alternating_flip:
            flipped_first = draw_flips(_identities(options.seed, 0, indices))
            changes["flip"] = tf.not_equal(flipped_first, epoch % 2 == 1)
        images, labels, weights = self._gather(indices, replica)
        return change(images, changes, options), labels, weights


class ValidationImages(ImagesOnDevice):
    """Batches with each validation image once, padded with labels -1 and weights 0."""

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's batch of an evaluation step; see :class:`ImagesOnDevice`."""
        places = self._places(step, replica)
        images, labels, weights = self._gather(tf.minimum(places, self._count - 1), replica)
        real = places < self._count
        real_labels = real if labels.shape.rank == 1 else real[:, tf.newaxis]
        return images, tf.where(real_labels, labels, PADDING), tf.where(real, weights, 0.0)


def draw_in_groups(
    places: tf.Tensor, count: int, epoch: tf.Tensor, options: DataOptions
) -> Changes:
    """Draws the augmentation of groups of images (Page 2019).

    For each transformation, the images of an epoch are divided at random into near-equal groups,
    one for each possible value (such as each flip or corner), but at most 200. Each group gets a
    different value.

    Args:
      places: int64 [images], positions of the images in the epoch.
      count: number of images in an epoch.
      epoch: int64.
      options: selects the transformations.

    Returns:
      The arguments of :func:`change`: ``shift`` and ``cut``, int32 [images, 2], and ``flip``, bool
      [images], without unselected ones.
    """

    def draw(number: int, purpose: str) -> tf.Tensor:
        groups = min(number, _MAX_GROUPS, count)
        mixed = stateless_random.permuted(places, count, options.seed, epoch, f"{purpose} groups")
        return stateless_random.permuted(
            mixed * groups // count, number, options.seed, epoch, purpose
        )

    def corners(positions: int, purpose: str) -> tf.Tensor:
        corner = draw(positions**2, purpose)
        return tf.cast(tf.stack([corner // positions, corner % positions], axis=1), tf.int32)

    changes = {}
    if options.train_crop == "pad":
        changes["shift"] = corners(2 * options.crop_padding + 1, "shift")
    if options.flip:
        changes["flip"] = draw(2, "flip") == 1
    if options.cutout:
        changes["cut"] = corners(options.image_size - options.cutout + 1, "cutout")
    return changes


def change(images: tf.Tensor, changes: Changes, options: DataOptions) -> tf.Tensor:
    """Augments a batch of images, with the same result as ``augment`` of each image.

    Args:
      images: uint8 [images, size, size, 3].
      changes: any of ``shift``, ``flip``, ``light`` and ``cut``, [images, ...].
      options: gives the padding of a shift, the side of a cutout, and the mean and standard
        deviation of pixels.
    """
    size = images.shape[1]
    rows = columns = tf.range(size)[tf.newaxis]
    if "flip" in changes:
        columns = tf.where(changes["flip"][:, tf.newaxis], size - 1 - columns, columns)
    if "shift" in changes:
        offsets = changes["shift"] - options.crop_padding
        rows, columns = rows + offsets[:, :1], columns + offsets[:, 1:]
    if "shift" in changes or "flip" in changes:
        images = _pixels(images, _reflected(rows, size), _reflected(columns, size))
    if "shift" in changes and options.crop_border == "zeros":
        inside = _is_inside(rows, size)[:, :, tf.newaxis] & _is_inside(columns, size)[:, tf.newaxis]
        images = tf.where(inside[..., tf.newaxis], images, tf.zeros([], images.dtype))
    if "light" in changes:
        pixels = change_light(tf.cast(images, tf.float32), changes["light"], options)
        images = tf.saturate_cast(tf.round(pixels), images.dtype)
    if "cut" in changes:
        images = cut_out(images, changes["cut"], options)
    return images


def gather(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Returns ``tf.gather(values, places)``, on GPUs also of uint8.

    ``GatherV2`` has no kernel for uint8 there (``ResourceGather``, of variables, has one).

    Args:
      values: [count, ...], of a float dtype or uint8.
      places: positions in the first dimension, int32 or int64.
    """
    if values.dtype != tf.uint8:
        return tf.gather(values, places)
    # float32 represents all values exactly.
    return tf.cast(tf.gather(tf.cast(values, tf.float32), places), tf.uint8)


def _identities(seed: int, epoch: tf.Tensor | int, places: tf.Tensor) -> tf.Tensor:
    """Returns the identities of images for :mod:`stateless_random`, int64 [images, 3]."""
    seeds = tf.fill(tf.shape(places), tf.constant(seed, tf.int64))
    epochs = tf.fill(tf.shape(places), tf.cast(epoch, tf.int64))
    return tf.stack([seeds, epochs, places], axis=1)


def _pixels(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Returns the pixels of each image at the given rows and columns, int32 [images, size]."""
    count, size = tf.shape(images)[0], images.shape[1]
    starts = tf.range(count)[:, tf.newaxis, tf.newaxis] * size**2
    places = starts + rows[:, :, tf.newaxis] * size + columns[:, tf.newaxis, :]
    return gather(tf.reshape(images, [-1, images.shape[3]]), places)


def _reflected(places: tf.Tensor, size: int) -> tf.Tensor:
    """Returns coordinates, with those outside of the image reflected at its outermost pixels."""
    return size - 1 - tf.abs(size - 1 - tf.abs(places))


def _is_inside(places: tf.Tensor, size: int) -> tf.Tensor:
    return (places >= 0) & (places < size)
