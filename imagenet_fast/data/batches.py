"""From batches of records to batches of images, of which none is lost that can be read.

Examples are parsed, and boxes and changes of colour drawn, for a batch at once. Images are
decoded one by one, those of a batch in one thread, and several batches at a time. Where anything
fails, only its batch is done again with care, image by image, so that good batches cost no more
than if nothing could fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from imagenet_fast.data import decode
from imagenet_fast.data.augment import Changes, augment, draw_changes
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.crop_boxes import evaluation_crop_boxes, training_crop_boxes
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, LABEL, WIDTH
from imagenet_fast.data.headers import check_header, image_size
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.jpeg_index import cut_jpegs
from imagenet_fast.data.options import DataOptions

# The label of what fills a batch and does not count.
PADDING = -1

_FEATURES = {
    ENCODED: tf.io.FixedLenFeature([], tf.string),
    LABEL: tf.io.FixedLenFeature([], tf.int64),
    HEIGHT: tf.io.FixedLenFeature([], tf.int64, default_value=0),
    WIDTH: tf.io.FixedLenFeature([], tf.int64, default_value=0),
    JPEG_INDEX: tf.io.FixedLenFeature([], tf.string, default_value=""),
}

# What is to be done to each image of a batch: (encoded, label, box, is_cut, changes).
Plan = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, Changes]


def training_batches(
    order: tf.data.Dataset,
    info: DatasetInfo,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
    in_python: bool = True,
) -> tf.data.Dataset:
    """Returns the batches that are trained on.

    Args:
      order: batches of records and of their identities, as ``order.training_order`` gives them,
        or of the indexes of JPEGs, too, as ``cache.records_from_memory`` does.
      info: of the data set.
      options: says what becomes of an image.
      threads: batches that are made at the same time.
      bad_images: where to list those that cannot be read.
      in_python: whether the batches are made in this process, so that Python can warn.

    Returns:
      ``(images, labels, weights)``, uint8 [batch, image_size, image_size, 3], int32 [batch] and
      float32 [batch]. The weight is 1; 0 where an image could not be read.
    """
    plan = functools.partial(plan_training, info=info, options=options, warn=in_python)
    return _batches(order, plan, options, threads, bad_images)


def plan_training(
    records: tf.Tensor,
    identities: tf.Tensor,
    indexes: tf.Tensor | None = None,
    *,
    info: DatasetInfo,
    options: DataOptions,
    careful: bool = False,
    warn: bool = False,
) -> Plan:
    """Returns what will be done to the images of a batch of records, and the images themselves.

    Args:
      records: string [batch].
      identities: int64 [batch, 3].
      indexes: of JPEGs whose records have none, string [batch], empty for others; None: there are
        no more than the records have.
      info: of the data set.
      options: says what becomes of an image.
      careful: whether to look at the images themselves for their sizes.
      warn: whether to warn of JPEG indexes that do not fit, which takes Python.
    """
    examples, labels = parse_examples(records, info)
    sizes = _header_sizes(examples, options) if careful else _sizes(examples, options)
    boxes = training_crop_boxes(sizes, identities, options)
    if indexes is not None:
        own = examples[JPEG_INDEX]
        examples[JPEG_INDEX] = tf.where(tf.strings.length(own) > 0, own, indexes)
    encoded, boxes, is_cut = _cut(examples[ENCODED], examples, boxes, options, warn)
    return encoded, labels, boxes, is_cut, draw_changes(identities, options)


def evaluation_batches(
    records: tf.data.Dataset,
    info: DatasetInfo,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
    in_python: bool = True,
) -> tf.data.Dataset:
    """Returns the batches that are evaluated: as :func:`training_batches`, of batches of records.

    The last one may be smaller.
    """

    def plan(records: tf.Tensor, careful: bool) -> Plan:
        examples, labels = parse_examples(records, info)
        # As in serving, which knows nothing but the image.
        encoded, sizes = tf.map_fn(
            lambda image: check_header(image, options.max_pixels),
            examples[ENCODED],
            fn_output_signature=(tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.int32)),
        )
        boxes = evaluation_crop_boxes(sizes, options)
        encoded, boxes, is_cut = _cut(encoded, examples, boxes, options, in_python)
        return encoded, labels, boxes, is_cut, {}

    return _batches(records, plan, options, threads, bad_images)


def _cut(
    encoded: tf.Tensor,
    examples: dict[str, tf.Tensor],
    boxes: tf.Tensor,
    options: DataOptions,
    warn: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns images, boxes in them, and which of the images hold just the blocks around them."""
    if not uses_jpeg_index(options):
        return encoded, boxes, tf.zeros_like(boxes[:, 0], tf.bool)
    scales = decode.jpeg_ratios(boxes, options)
    return cut_jpegs(encoded, examples[JPEG_INDEX], boxes, scales, warn)


def uses_jpeg_index(options: DataOptions) -> bool:
    """Returns whether JPEGs that have an index are decoded with its help."""
    return options.jpeg_index and options.resize_kernel == "native"


def make_image(
    encoded: tf.Tensor,
    box: tf.Tensor,
    is_cut: tf.Tensor,
    changes: Changes,
    options: DataOptions,
) -> tf.Tensor:
    """Does what was planned: uint8 [image_size, image_size, 3] of an image's part of a plan."""
    changes = dict(changes)
    # It costs next to nothing to flip while resizing, but a shift comes in between.
    flipped = None if "shift" in changes else changes.pop("flip", None)
    if uses_jpeg_index(options):
        decoded, inner_box = decode.decode_cut_or_crop(encoded, box, is_cut, options)
        image = decode.resize(decoded, options, flipped, inner_box)
    else:
        image = decode.decode_crop_and_resize(encoded, box, options, flipped)
    return augment(image, changes, options)


def unreadable(options: DataOptions, label: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (image, label, weight) of what takes a place but does not count."""
    size = options.image_size
    return tf.zeros([size, size, 3], tf.uint8), tf.constant(label, tf.int32), tf.constant(0.0)


def _batches(
    batches: tf.data.Dataset,
    plan: Callable[..., Plan],
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None,
) -> tf.data.Dataset:
    def image(
        encoded: tf.Tensor, label: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return make_image(encoded, box, is_cut, changes, options), label, tf.constant(1.0)

    def images(*batch: tf.Tensor, careful: bool) -> tf.data.Dataset:
        planned = tf.data.Dataset.from_tensors(batch).map(lambda *b: plan(*b, careful=careful))
        return planned.flat_map(lambda *p: tf.data.Dataset.from_tensor_slices(p)).map(image)

    def one_by_one(*record: tf.Tensor) -> tf.data.Dataset:
        batch_of_one = (part[tf.newaxis] for part in record)
        given_up = tf.data.Dataset.from_tensors(record[0]).map(give_up)
        return images(*batch_of_one, careful=True).ignore_errors().concatenate(given_up).take(1)

    def give_up(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if bad_images:
            tf.numpy_function(bad_images.add, [record], [])
        return unreadable(options, label=0)

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        size = tf.shape(records[0], tf.int64)[0]
        # Whole or not at all: batching goes on behind an error, with the images that are left.
        fast = images(*records, careful=False).batch(size, drop_remainder=True).ignore_errors()
        one_at_a_time = tf.data.Dataset.from_tensor_slices(records).flat_map(one_by_one)
        return fast.concatenate(one_at_a_time.batch(size)).take(1)

    made = batches.interleave(
        batch, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )
    size = tf.nest.flatten(batches.element_spec)[0].shape[0]
    return made.map(
        lambda *parts: tuple(tf.ensure_shape(part, [size, *part.shape[1:]]) for part in parts)
    )


def parse_examples(records: tf.Tensor, info: DatasetInfo) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the examples' fields and their classes, checked against the number of classes."""
    examples = tf.io.parse_example(records, _FEATURES)
    labels = tf.cast(examples[LABEL] + info.label_offset, tf.int32)
    in_range = tf.logical_and(labels >= 0, labels < info.num_classes)
    tf.debugging.Assert(tf.reduce_all(in_range), ["label out of range:", labels])
    return examples, labels


def _sizes(examples: dict[str, tf.Tensor], options: DataOptions) -> tf.Tensor:
    """Returns the images' heights and widths, int32 [images, 2], from the records if they tell."""
    told = tf.cast(tf.stack([examples[HEIGHT], examples[WIDTH]], axis=1), tf.int32)
    return tf.cond(tf.reduce_all(told > 0), lambda: told, lambda: _header_sizes(examples, options))


def _header_sizes(examples: dict[str, tf.Tensor], options: DataOptions) -> tf.Tensor:
    """Returns the same from the images themselves."""
    return tf.map_fn(
        lambda image: image_size(image, options.max_pixels),
        examples[ENCODED],
        fn_output_signature=tf.TensorSpec([2], tf.int32),
    )
