"""Images that are held, shuffled and changed by the device that trains on them.

For data sets of the size of CIFAR-10, 150 MB, whose images a host could not prepare as fast as an
accelerator takes them (Page 2019, "How to Train Your ResNet"). A weight update needs to be told
nothing but its number: which images it takes, and what is done to them, are functions of (seed,
epoch, step), as they are of those that the host prepares.
"""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.data import stateless_random
from imagenet_fast.data.augment import Changes, cut_out, draw_changes, draw_flips
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.batches import PADDING
from imagenet_fast.data.cache import images_of
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.order import part_of

# Of a transformation's options, so many are used in an epoch, at most (Page).
_MOST_OPTIONS = 200

Batch = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class ImagesOnDevice:
    """The images of a split, in the memory of each device.

    To be made outside of the strategy's scope. Not a ``tf.Module``, since Keras would take its
    variables for some of the model's weights.

    Args:
      info: of the data set.
      split: ``train`` or ``validation``.
      options: says how the images are prepared, and changed in training.
      batch_size: images of a batch, of which each replica makes one in a step.
      strategy: of the replicas.
      threads: that decode.
      bad_images: where to list those that cannot be read.
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
        # TensorFlow keeps variables of int32 in the host's memory.
        parts = {"images": images, "labels": tf.cast(labels, tf.int64), "weights": weights}

        def make() -> list[tf.Variable]:
            return [
                tf.Variable(part, trainable=False, name=f"{split}_{name}")
                for name, part in parts.items()
            ]

        # Of this process' replicas in their order; or one for all, that the strategy takes care of.
        self._copies: list[list[tf.Variable]] = []
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            # Its variables begin as what the first worker sends, which cannot be uint8.
            for device in strategy.extended.worker_devices:
                with tf.device(device):
                    self._copies.append(make())
        else:
            with strategy.scope():
                self._copies.append(make())

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's images of a step; to be called in the replica.

        Args:
          step: number of the step, int64, from 0.
          replica: number of the replica among all, from 0.

        Returns:
          uint8 [batch_size, image_size, image_size, 3], int32 [batch_size] and float32
          [batch_size], whose weights are 0 for images that could not be read.
        """
        raise NotImplementedError

    def _places(self, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
        """Returns the places of a replica's images among those of all steps, int64 [batch_size]."""
        batch = step * self._replicas + tf.cast(replica, tf.int64)
        return batch * self._batch_size + tf.range(self._batch_size, dtype=tf.int64)

    def _gather(self, indices: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        own = 0
        if len(self._copies) > 1:
            # A replica's program is made for it alone, and knows its number.
            own = int(tf.get_static_value(tf.convert_to_tensor(replica))) % len(self._copies)
        images, labels, weights = (tf.gather(part, indices) for part in self._copies[own])
        return images, tf.cast(labels, tf.int32), weights


class TrainingImages(ImagesOnDevice):
    """Batches of the training images, in an order and with changes that are other ones each epoch.

    What does not fill a batch of all replicas at the end of an epoch is left out.
    """

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's images of a weight update; see :class:`ImagesOnDevice`."""
        options = self._options
        global_batch = self._batch_size * self._replicas
        steps_per_epoch = self._count // global_batch
        epoch = step // steps_per_epoch
        places = self._places(step % steps_per_epoch, replica)
        indices = stateless_random.permuted(places, self._count, options.seed, epoch, "order")
        if options.augment_in_groups:
            changes = draw_in_groups(places, steps_per_epoch * global_batch, epoch, options)
        else:
            changes = draw_changes(_identities(options.seed, epoch, places), options)
        if options.alternating_flip:
            flipped_first = draw_flips(_identities(options.seed, 0, indices))
            changes["flip"] = tf.not_equal(flipped_first, epoch % 2 == 1)
        images, labels, weights = self._gather(indices, replica)
        return change(images, changes, options), labels, weights


class ValidationImages(ImagesOnDevice):
    """Batches of the validation images, each once; behind them, labels are -1 and weights 0."""

    def batch(self, step: tf.Tensor, replica: tf.Tensor | int) -> Batch:
        """Returns a replica's images of a step of evaluation; see :class:`ImagesOnDevice`."""
        places = self._places(step, replica)
        images, labels, weights = self._gather(tf.minimum(places, self._count - 1), replica)
        real = places < self._count
        return images, tf.where(real, labels, PADDING), tf.where(real, weights, 0.0)


def draw_in_groups(
    places: tf.Tensor, count: int, epoch: tf.Tensor, options: DataOptions
) -> Changes:
    """Draws what will be done to images, the same for all of a group, as Page 2019 does.

    For each transformation, the images of an epoch are split at random into as many near-equal
    groups as there are options to choose from, or 200 if there are more, and each group gets one.

    Args:
      places: int64 [images], of the images in the epoch's order.
      count: images in an epoch.
      epoch: int64.
      options: names the transformations.

    Returns:
      By name, what :func:`change` takes: ``shift`` and ``cut``, int32 [images, 2], and ``flip``,
      bool [images]; without those that are not done.
    """

    def draw(number: int, purpose: str) -> tf.Tensor:
        groups = min(number, _MOST_OPTIONS, count)
        mixed = stateless_random.permuted(places, count, options.seed, epoch, f"{purpose} groups")
        return stateless_random.permuted(
            mixed * groups // count, number, options.seed, epoch, purpose
        )

    def corners(positions: int, purpose: str) -> tf.Tensor:
        option = draw(positions**2, purpose)
        return tf.cast(tf.stack([option // positions, option % positions], axis=1), tf.int32)

    changes = {}
    if options.train_crop == "pad":
        changes["shift"] = corners(2 * options.crop_padding + 1, "shift")
    if options.flip:
        changes["flip"] = draw(2, "flip") == 1
    if options.cutout:
        changes["cut"] = corners(options.image_size - options.cutout + 1, "cutout")
    return changes


def change(images: tf.Tensor, changes: Changes, options: DataOptions) -> tf.Tensor:
    """Changes a batch of images: what ``augment`` does to each, in few operations on all.

    Args:
      images: uint8 [images, size, size, 3].
      changes: of ``shift``, ``flip`` and ``cut`` those that were drawn, [images, ...].
      options: gives the margin of a shift and what it is made of, and the side of a cut.
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
    if "cut" in changes:
        images = cut_out(images, changes["cut"], options)
    return images


def _identities(seed: int, epoch: tf.Tensor | int, places: tf.Tensor) -> tf.Tensor:
    """Returns what ``draws`` takes of images, int64 [images, 3]."""
    seeds = tf.fill(tf.shape(places), tf.constant(seed, tf.int64))
    epochs = tf.fill(tf.shape(places), tf.cast(epoch, tf.int64))
    return tf.stack([seeds, epochs, places], axis=1)


def _pixels(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Returns where the given rows and columns of each image, int32 [images, size], cross."""
    count, size = tf.shape(images)[0], images.shape[1]
    starts = tf.range(count)[:, tf.newaxis, tf.newaxis] * size**2
    places = starts + rows[:, :, tf.newaxis] * size + columns[:, tf.newaxis, :]
    # GPUs gather no bytes; as float32 they are what they were.
    flat = tf.cast(tf.reshape(images, [-1, images.shape[3]]), tf.float32)
    return tf.cast(tf.gather(flat, places), images.dtype)


def _reflected(places: tf.Tensor, size: int) -> tf.Tensor:
    """Returns places in a row, of which those outside are reflected at its outermost pixels."""
    return size - 1 - tf.abs(size - 1 - tf.abs(places))


def _is_inside(places: tf.Tensor, size: int) -> tf.Tensor:
    return (places >= 0) & (places < size)
