"""Conversion of batches of records to batches of images, with placeholders for unreadable ones.

Examples are parsed, and crop boxes and augmentations drawn, for a whole batch. Each batch's images
are decoded by one thread; several batches are processed in parallel. If anything in a batch fails,
that batch is processed again image by image, so handling errors costs other batches nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from imagenet_fast.data import decode
from imagenet_fast.data.augmentation.augment import Changes, augment, draw_changes
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes, training_crop_boxes
from imagenet_fast.data.augmentation.options import AugmentationOptions
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, LABEL, WIDTH
from imagenet_fast.data.headers import check_header, image_size
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.jpeg.index import cut_jpegs

# The label of padding in the last batches of an evaluation.
PADDING = -1

_FEATURES = {
    ENCODED: tf.io.FixedLenFeature([], tf.string),
    LABEL: tf.io.FixedLenFeature([], tf.int64),
    HEIGHT: tf.io.FixedLenFeature([], tf.int64, default_value=0),
    WIDTH: tf.io.FixedLenFeature([], tf.int64, default_value=0),
}
_INDEX = {JPEG_INDEX: tf.io.FixedLenFeature([], tf.string, default_value="")}

# How to make each image of a batch: (encoded image, label, crop box, is_cut, changes).
Plan = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, Changes]


def training_batches(
    order: tf.data.Dataset,
    info: DatasetInfo,
    options: AugmentationOptions,
    threads: int,
    bad_images: BadImages | None = None,
    in_python: bool = True,
) -> tf.data.Dataset:
    """Returns batches of training images.

    Args:
      order: batches of records and identities from ``order.training_order``.
      info: the data set.
      options: gives the preprocessing and augmentation.
      threads: number of batches processed in parallel.
      bad_images: lists unreadable images.
      in_python: whether the dataset runs in this process, so that Python can warn.

    Returns:
      ``(images, labels, weights)``, uint8 [batch, image_size, image_size, 3], int32 [batch] and
      float32 [batch]. The weight is 1, or 0 for unreadable images.
    """
    options = options.part(AugmentationOptions)
    plan = functools.partial(plan_training, info=info, options=options, warn=in_python)
    preprocessing = _Preprocessing(
        "train", info.label_offset, info.num_classes, options, in_python, plan
    )
    return _batches(order, preprocessing, threads, bad_images)


def plan_training(
    records: tf.Tensor,
    identities: tf.Tensor,
    *,
    info: DatasetInfo,
    options: AugmentationOptions,
    careful: tf.Tensor | bool = False,
    warn: bool = False,
) -> Plan:
    """Returns the plan for a batch of training records.

    Args:
      records: string [batch].
      identities: int64 [batch, 3].
      info: the data set.
      options: gives the preprocessing and augmentation.
      careful: whether to read image sizes from the images instead of the records, a bool scalar.
      warn: whether to warn of JPEG indexes that do not match, by a Python function.
    """
    examples, labels = parse_examples(records, info, options)
    sizes = _sizes(examples, options, careful)
    boxes = training_crop_boxes(sizes, identities, options)
    encoded, boxes, is_cut = _cut(examples[ENCODED], examples, boxes, options, warn)
    return encoded, labels, boxes, is_cut, draw_changes(identities, options)


def evaluation_batches(
    records: tf.data.Dataset,
    info: DatasetInfo,
    options: AugmentationOptions,
    threads: int,
    bad_images: BadImages | None = None,
    in_python: bool = True,
) -> tf.data.Dataset:
    """Returns batches of evaluation images, as :func:`training_batches`, from batches of records.

    The last batch may be smaller.
    """
    options = options.part(AugmentationOptions)

    def plan(records: tf.Tensor, careful: tf.Tensor) -> Plan:
        examples, labels = parse_examples(records, info, options)
        # The size comes from the image, as in serving, and not from the record.
        encoded, sizes = tf.map_fn(
            lambda image: check_header(image, options.max_pixels),
            examples[ENCODED],
            fn_output_signature=(tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.int32)),
        )
        boxes = evaluation_crop_boxes(sizes, options)
        encoded, boxes, is_cut = _cut(encoded, examples, boxes, options, in_python)
        return encoded, labels, boxes, is_cut, {}

    preprocessing = _Preprocessing(
        "evaluation", info.label_offset, info.num_classes, options, in_python, plan
    )
    return _batches(records, preprocessing, threads, bad_images)


def _cut(
    encoded: tf.Tensor,
    examples: dict[str, tf.Tensor],
    boxes: tf.Tensor,
    options: AugmentationOptions,
    warn: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns images, crop boxes in them, and which images were cut to the blocks around them."""
    if not uses_jpeg_index(options):
        return encoded, boxes, tf.zeros_like(boxes[:, 0], tf.bool)
    scales = decode.jpeg_ratios(boxes, options)
    return cut_jpegs(encoded, examples[JPEG_INDEX], boxes, scales, warn)


def uses_jpeg_index(options: AugmentationOptions) -> bool:
    """Returns whether JPEG indexes are used for decoding."""
    return options.jpeg_index and options.resize_kernel == "native"


def make_image(
    encoded: tf.Tensor,
    box: tf.Tensor,
    is_cut: tf.Tensor,
    changes: Changes,
    options: AugmentationOptions,
) -> tf.Tensor:
    """Returns a decoded, resized and augmented image, uint8 [image_size, image_size, 3].

    The arguments are one image's part of a ``Plan``.
    """
    changes = dict(changes)
    # Flipping while resizing is nearly free, but would come before a shift.
    flipped = None if "shift" in changes else changes.pop("flip", None)
    if uses_jpeg_index(options):
        decoded, inner_box = decode.decode_cut_or_crop(encoded, box, is_cut, options)
        image = decode.resize(decoded, options, flipped, inner_box)
    else:
        image = decode.decode_crop_and_resize(encoded, box, options, flipped)
    return augment(image, changes, options)


def unreadable(options: AugmentationOptions, label: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns a placeholder (image, label, weight) of weight 0."""
    size = options.image_size
    return tf.zeros([size, size, 3], tf.uint8), tf.constant(label, tf.int32), tf.constant(0.0)


@dataclasses.dataclass(frozen=True)
class _Preprocessing:
    """How batches of images are made; equal ones share their traced functions.

    Attributes:
      split: ``train`` or ``evaluation``.
      label_offset: added to a stored label.
      num_classes: of the data set.
      options: those that affect images; others have their defaults.
      in_python: whether Python can be called.
      plan: returns the plan of a batch, given what is above.
    """

    split: str
    label_offset: int
    num_classes: int
    options: AugmentationOptions
    in_python: bool
    plan: Callable[..., Plan] = dataclasses.field(compare=False)


# Several, because a run has training and evaluation, of perhaps several sizes.
@functools.lru_cache(maxsize=8)
def _traced(
    preprocessing: _Preprocessing, signature: tuple[tf.TensorSpec, ...], graph: tf.Graph
) -> tuple[Callable[..., Plan], Callable[..., tf.Tensor]]:
    """Returns functions that make a batch's plan and an image, which are traced once.

    Args:
      preprocessing: how batches are made.
      signature: of the arguments of ``preprocessing.plan``, for any number of images; the last is
        ``careful``.
      graph: TensorFlow's global graph, with which ``keras.backend.clear_session`` forgets the
        Python functions of traced ones.
    """

    @functools.partial(tf.function, input_signature=signature, autograph=False)
    def plan(*batch_and_careful: tf.Tensor) -> Plan:
        *batch, careful = batch_and_careful
        return preprocessing.plan(*batch, careful=careful)

    @functools.partial(tf.function, autograph=False)
    def image(encoded: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes) -> tf.Tensor:
        return make_image(encoded, box, is_cut, changes, preprocessing.options)

    return plan, image


def _batches(
    batches: tf.data.Dataset,
    preprocessing: _Preprocessing,
    threads: int,
    bad_images: BadImages | None,
) -> tf.data.Dataset:
    parts = tf.nest.flatten(batches.element_spec)
    any_number = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in parts]
    signature = (*any_number, tf.TensorSpec([], tf.bool))
    plan, make = _traced(preprocessing, signature, tf.compat.v1.get_default_graph())

    def image(
        encoded: tf.Tensor, label: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return make(encoded, box, is_cut, changes), label, tf.constant(1.0)

    def images(*batch: tf.Tensor, careful: bool) -> tf.data.Dataset:
        planned = tf.data.Dataset.from_tensors(batch).map(lambda *b: plan(*b, careful))
        return planned.flat_map(lambda *p: tf.data.Dataset.from_tensor_slices(p)).map(image)

    def one_by_one(*record: tf.Tensor) -> tf.data.Dataset:
        batch_of_one = (part[tf.newaxis] for part in record)
        placeholder = tf.data.Dataset.from_tensors(record[0]).map(report)
        return images(*batch_of_one, careful=True).ignore_errors().concatenate(placeholder).take(1)

    def report(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if bad_images:
            tf.numpy_function(bad_images.add, [record], [])
        return unreadable(preprocessing.options, label=0)

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        size = tf.shape(records[0], tf.int64)[0]
        # drop_remainder, because after an error a batch of the remaining images would follow.
        fast = images(*records, careful=False).batch(size, drop_remainder=True).ignore_errors()
        one_at_a_time = tf.data.Dataset.from_tensor_slices(records).flat_map(one_by_one)
        return fast.concatenate(one_at_a_time.batch(size)).take(1)

    image_batches = batches.interleave(
        batch, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )
    size = tf.nest.flatten(batches.element_spec)[0].shape[0]
    return image_batches.map(
        lambda *parts: tuple(tf.ensure_shape(part, [size, *part.shape[1:]]) for part in parts)
    )


def parse_examples(
    records: tf.Tensor, info: DatasetInfo, options: AugmentationOptions
) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the examples' fields, and their classes, which are checked to be in range.

    JPEG indexes are among the fields if ``options`` use them.
    """
    features = {**_FEATURES, **_INDEX} if uses_jpeg_index(options) else _FEATURES
    examples = tf.io.parse_example(records, features)
    labels = tf.cast(examples[LABEL] + info.label_offset, tf.int32)
    in_range = tf.logical_and(labels >= 0, labels < info.num_classes)
    tf.debugging.Assert(tf.reduce_all(in_range), ["label out of range:", labels])
    return examples, labels


def _sizes(
    examples: dict[str, tf.Tensor], options: AugmentationOptions, careful: tf.Tensor | bool
) -> tf.Tensor:
    """Returns images' heights and widths, int32 [images, 2].

    They are from the records, if all have them and ``careful`` is false.
    """
    sizes = tf.cast(tf.stack([examples[HEIGHT], examples[WIDTH]], axis=1), tf.int32)
    use_records = tf.reduce_all(sizes > 0) & tf.logical_not(careful)
    return tf.cond(use_records, lambda: sizes, lambda: _header_sizes(examples, options))


def _header_sizes(examples: dict[str, tf.Tensor], options: AugmentationOptions) -> tf.Tensor:
    """Returns images' heights and widths, int32 [images, 2], from the images' headers."""
    return tf.map_fn(
        lambda image: image_size(image, options.max_pixels),
        examples[ENCODED],
        fn_output_signature=tf.TensorSpec([2], tf.int32),
    )
