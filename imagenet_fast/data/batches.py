"""Conversion of batches of records to batches of images, with placeholders for unreadable ones.

Examples are parsed, and crop boxes and augmentations drawn, for a whole batch. Native ops also make
its images at once, with all threads; without them, each image goes through TensorFlow's ops, and
each thread makes a batch. If anything in a batch fails, that batch is made again image by image, so
handling errors costs other batches nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.augmentation.augment import Changes, augment, draw_changes
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes, training_crop_boxes
from imagenet_fast.data.augmentation.options import AugmentationOptions
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.decode import decode_crop_and_resize
from imagenet_fast.data.examples import ENCODED, HEIGHT, LABEL, WIDTH
from imagenet_fast.data.headers import check_header, image_size
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.jpeg.image_ops import make_images, read_examples
from imagenet_fast.data.shards import load_records

# The label of padding in the last batches of an evaluation; of multi-label data, of each class.
PADDING = -1

_LABEL = {LABEL: tf.io.FixedLenFeature([], tf.int64)}
_LABELS = {LABEL: tf.io.VarLenFeature(tf.int64)}
_FEATURES = {
    ENCODED: tf.io.FixedLenFeature([], tf.string),
    HEIGHT: tf.io.FixedLenFeature([], tf.int64, default_value=0),
    WIDTH: tf.io.FixedLenFeature([], tf.int64, default_value=0),
}

# Of an image: no size in a record above it is true. TensorFlow's decoder ends the process if the
# sum of two numbers of a box overflows.
_MOST_SIDE = 2**24

# Batches that are made at the same time by native ops: while the last images of one are made, the
# other threads begin the next.
_AT_ONCE = 2

_warned_of_indexes = threading.Event()


class Plan(NamedTuple):
    """How to make the images of a batch.

    Attributes:
      encoded: bytes of the image files, string [images]; with native ops, of the records.
      places: where the image and its index are in each record, int64 [images, 4], as of
        :class:`~imagenet_fast.data.jpeg.image_ops.Examples`; without native ops [images, 0].
      labels: classes, int32 [images]; of multi-label data int32 [images, classes], 1 for each class
        of an image and 0 for others.
      boxes: crop boxes, int32 [images, 4].
      changes: the augmentation of each image, [images, ...].
    """

    encoded: tf.Tensor
    places: tf.Tensor
    labels: tf.Tensor
    boxes: tf.Tensor
    changes: Changes


def training_batches(
    order: tf.data.Dataset,
    info: DatasetInfo,
    options: AugmentationOptions,
    threads: int,
    bad_images: BadImages | None = None,
    in_python: bool = True,
) -> tf.data.Dataset:
    """Returns batches of training images, from batches of records and identities.

    These are ``order.training_order``'s. With ``in_python``, the dataset runs in this process, so
    that Python can warn.

    Returns:
      ``(images, labels, weights)``, uint8 [batch, image_size, image_size, 3], int32 [batch] (of
      multi-label data int32 [batch, classes], 0 or 1) and float32 [batch]. The weight is 1, or 0
      for unreadable images.
    """
    preprocessing = _Preprocessing.of(True, info, options, threads, in_python)
    return _batches(order, preprocessing, bad_images)


def plan_training(
    records: tf.Tensor, identities: tf.Tensor, *, info: DatasetInfo, options: AugmentationOptions
) -> Plan:
    """Returns the plan for training records, string [images], and identities, int64 [images, 3]."""
    return _Preprocessing.of(True, info, options, 1, True).plan(records, identities)


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
    preprocessing = _Preprocessing.of(False, info, options, threads, in_python)
    return _batches(records, preprocessing, bad_images)


def uses_jpeg_index(options: AugmentationOptions) -> bool:
    """Returns whether JPEG indexes are used for decoding."""
    return options.jpeg_index and options.resize_kernel == "native"


def native_images(
    plan: Plan, options: AugmentationOptions, threads: int = 1, warn: bool = False
) -> tuple[tf.Tensor, Changes]:
    """Makes the images of a batch with native ops.

    With ``warn``, it warns once if indexes do not fit their images. This calls Python, which
    TensorFlow graphs that run in other processes cannot.

    Returns:
      uint8 [images, image_size, image_size, 3], and the changes that are left to make.
    """
    changes = dict(plan.changes)
    flipped = _pop_flip(changes)
    if flipped is None:
        flipped = tf.zeros(tf.shape(plan.boxes)[:1], tf.bool)
    images, misfits = make_images(
        plan.encoded, plan.places, plan.boxes, flipped, options=options, threads=threads
    )
    if warn and uses_jpeg_index(options):
        tf.cond(
            tf.reduce_any(misfits),
            lambda: tf.numpy_function(_warn_of_misfits, [misfits], tf.bool),
            lambda: True,
        )
    return images, changes


def make_image(
    encoded: tf.Tensor, box: tf.Tensor, changes: Changes, options: AugmentationOptions
) -> tf.Tensor:
    """Makes an image with TensorFlow's ops.

    Args:
      encoded: the image's part of a plan without native ops, likewise ``box`` and ``changes``.
      box: int32 [4].
      changes: of the image.
      options: gives the preprocessing.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    changes = dict(changes)
    flipped = _pop_flip(changes)
    return augment(decode_crop_and_resize(encoded, box, options, flipped), changes, options)


def _pop_flip(changes: Changes) -> tf.Tensor | None:
    """Takes the flip out of the changes, to flip while resizing, which is nearly free.

    That would come before a shift.
    """
    return None if "shift" in changes else changes.pop("flip", None)


def _warn_of_misfits(misfits: np.ndarray) -> bool:
    if not _warned_of_indexes.is_set():
        _warned_of_indexes.set()
        warn_once(
            f"jpeg_index: {misfits.sum()} of the {misfits.size} JPEGs of a batch do not match "
            "their indexes, as after re-encoding, and are decoded more slowly: replace the indexes "
            "with `imagenet-fast prepare --add_index`"
        )
    return True


def unreadable(
    options: AugmentationOptions, label: int, shape: tuple[int, ...] = ()
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns a placeholder (image, label, weight) of weight 0; ``shape`` is that of a label."""
    size = options.image_size
    image = tf.zeros([size, size, 3], tf.uint8)
    return image, tf.constant(label, tf.int32, shape), tf.constant(0.0)


@dataclasses.dataclass(frozen=True)
class _Preprocessing:
    """How batches of images are made; equal ones share their traced functions.

    In training, crops and changes are drawn, and sizes are those in the records, if there are any.
    In evaluation they are those in the images' headers, as in serving.
    """

    is_training: bool
    label_offset: int  # added to a stored label
    num_classes: int
    multi_label: bool  # whether an image has any number of labels
    options: AugmentationOptions  # those that affect images; others have their defaults
    threads: int  # that make images
    in_python: bool  # whether Python can be called

    @classmethod
    def of(
        cls,
        is_training: bool,
        info: DatasetInfo,
        options: AugmentationOptions,
        threads: int,
        in_python: bool,
    ) -> _Preprocessing:
        """Returns that of a data set's images."""
        options = options.part(AugmentationOptions)
        labels = info.label_offset, info.num_classes, info.multi_label
        return cls(is_training, *labels, options, threads, in_python)

    @property
    def is_native(self) -> bool:
        """Whether native ops make the images."""
        return self.options.resize_kernel == "native"

    def plan(
        self, records: tf.Tensor, *identities: tf.Tensor, careful: tf.Tensor | bool = False
    ) -> Plan:
        """Returns the plan for a batch of records.

        Args:
          records: string [images].
          *identities: in training, int64 [images, 3].
          careful: whether to take all sizes from the images' headers, a bool scalar. Native ops
            leave reading to TensorFlow's ops then, which also accept unusual records.
        """
        careful = tf.convert_to_tensor(careful)
        if self.is_native:
            encoded, places, labels, sizes = tf.cond(
                careful, lambda: self._parse(records, careful), lambda: self._read(records)
            )
        else:
            encoded, places, labels, sizes = self._parse(records, careful)
        labels = self._multi_hot(records) if self.multi_label else self._numbered(labels)
        if not self.is_training:
            return Plan(encoded, places, labels, evaluation_crop_boxes(sizes, self.options), {})
        (keys,) = identities
        boxes = training_crop_boxes(sizes, keys, self.options)
        return Plan(encoded, places, labels, boxes, draw_changes(keys, self.options))

    def _numbered(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns the classes of stored labels, int32 of the same shape."""
        labels = tf.cast(labels + self.label_offset, tf.int32)
        in_range = tf.logical_and(labels >= 0, labels < self.num_classes)
        tf.debugging.Assert(tf.reduce_all(in_range), ["label out of range:", labels])
        return labels

    def _multi_hot(self, records: tf.Tensor) -> tf.Tensor:
        """Returns the labels of multi-label records, int32 [images, classes].

        TensorFlow's parser finds them for a whole batch, without a copy of the images.
        """
        stored = tf.io.parse_example(records, _LABELS)[LABEL]
        places = tf.stack(
            [tf.cast(stored.indices[:, 0], tf.int32), self._numbered(stored.values)], 1
        )
        shape = [tf.size(records), self.num_classes]
        labels = tf.scatter_nd(places, tf.ones_like(places[:, 0]), shape)
        # A label that is stored twice counts once.
        return tf.ensure_shape(tf.minimum(labels, 1), [records.shape[0], self.num_classes])

    def _read(self, records: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns what ``_parse`` does, by a native op."""
        return tuple(
            read_examples(
                records,
                with_index=uses_jpeg_index(self.options),
                from_headers=not self.is_training,
                max_pixels=self.options.max_pixels,
                with_label=not self.multi_label,
            )
        )

    def _parse(self, records: tf.Tensor, careful: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns a plan's ``encoded`` and ``places``, labels as stored, int64, and sizes.

        Multi-label records have labels of 0 here, see ``_multi_hot``.
        """
        features = _FEATURES if self.multi_label else {**_FEATURES, **_LABEL}
        examples = tf.io.parse_example(records, features)
        labels = examples.get(LABEL, tf.zeros(tf.shape(records), tf.int64))
        if self.is_training:
            encoded, sizes = examples[ENCODED], self._sizes(examples, careful)
        else:
            encoded, sizes = tf.map_fn(
                lambda image: check_header(image, self.options.max_pixels),
                examples[ENCODED],
                fn_output_signature=(tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.int32)),
            )
        places = tf.zeros([tf.size(records), 0], tf.int64)
        if self.is_native:
            lengths = tf.cast(tf.strings.length(encoded), tf.int64)
            places = tf.stack([0 * lengths, lengths, 0 * lengths, 0 * lengths], axis=1)
        return encoded, places, labels, sizes

    def _sizes(self, examples: dict[str, tf.Tensor], careful: tf.Tensor) -> tf.Tensor:
        """Returns images' heights and widths, int32 [images, 2].

        They are from the records, if all have them and ``careful`` is false.
        """
        sizes = tf.stack([examples[HEIGHT], examples[WIDTH]], axis=1)
        are_sides = (sizes > 0) & (sizes <= _MOST_SIDE)
        use_records = tf.reduce_all(are_sides) & tf.logical_not(careful)

        def from_headers() -> tf.Tensor:
            return tf.map_fn(
                lambda image: image_size(image, self.options.max_pixels),
                examples[ENCODED],
                fn_output_signature=tf.TensorSpec([2], tf.int32),
            )

        return tf.cond(use_records, lambda: tf.cast(sizes, tf.int32), from_headers)

    def begin(self, *arguments: tf.Tensor) -> tuple[tuple[Any, ...], tf.Tensor]:
        """Returns the arguments of :meth:`end` for all images of a batch, and their labels.

        The arguments are those of :meth:`plan`, ``careful`` the last one.
        """
        *batch, careful = arguments
        plan = self.plan(*batch, careful=careful)
        if self.is_native:
            return native_images(plan, self.options, self.threads, self.in_python), plan.labels
        return (plan.encoded, plan.boxes, plan.changes), plan.labels

    def end(self, *parts: Any) -> tf.Tensor:
        """Returns an image, uint8 [image_size, image_size, 3], from its part of :meth:`begin`."""
        finish = augment if self.is_native else make_image
        return functools.partial(finish, options=self.options)(*parts)


# Several, because a run has training and evaluation, of perhaps several sizes.
@functools.lru_cache(maxsize=8)
def _traced(
    preprocessing: _Preprocessing, signature: tuple[tf.TensorSpec, ...], graph: tf.Graph
) -> tuple[tf.types.experimental.GenericFunction, Callable[..., tf.Tensor]]:
    """Returns :meth:`_Preprocessing.begin` and ``end``, which are traced once.

    ``signature`` is that of the arguments of ``begin``, for any number of images; the last is
    ``careful``. ``graph`` is TensorFlow's global graph, with which ``keras.backend.clear_session``
    forgets the Python functions of traced ones.
    """
    begin = tf.function(preprocessing.begin, input_signature=signature, autograph=False)
    return begin, tf.function(preprocessing.end, autograph=False)


def _batches(
    batches: tf.data.Dataset, preprocessing: _Preprocessing, bad_images: BadImages | None
) -> tf.data.Dataset:
    if preprocessing.is_native:
        # An error of a disk is none of an image.
        batches = batches.map(
            lambda records, *others: (load_records(records), *others),
            num_parallel_calls=_AT_ONCE,
            deterministic=True,
        )
    specs = tf.nest.flatten(batches.element_spec)
    any_number = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in specs]
    signature = (*any_number, tf.TensorSpec([], tf.bool))
    begin, end = _traced(preprocessing, signature, tf.compat.v1.get_default_graph())
    (_, *changes), begin_labels = begin.get_concrete_function().structured_outputs
    ends_at_once = preprocessing.is_native and not any(changes)

    def make(*batch: tf.Tensor, careful: bool) -> tf.data.Dataset:
        begun = tf.data.Dataset.from_tensors(batch).map(lambda *parts: begin(*parts, careful))
        if ends_at_once:
            return begun.map(
                lambda parts, labels: (parts[0], labels, tf.ones(tf.shape(labels)[:1]))
            )
        each = begun.unbatch().map(lambda parts, label: (end(*parts), label, tf.constant(1.0)))
        # drop_remainder, because after an error a batch of the remaining images would follow.
        return each.batch(tf.shape(batch[0], tf.int64)[0], drop_remainder=True)

    def one_by_one(*record: tf.Tensor) -> tf.data.Dataset:
        batch_of_one = (part[tf.newaxis] for part in record)
        placeholder = tf.data.Dataset.from_tensors(record[0]).map(report)
        made = make(*batch_of_one, careful=True).unbatch().ignore_errors()
        return made.concatenate(placeholder).take(1)

    def report(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if bad_images:
            tf.numpy_function(bad_images.add, [record], [])
        return unreadable(preprocessing.options, 0, begin_labels.shape[1:])

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        size = tf.shape(records[0], tf.int64)[0]
        one_at_a_time = tf.data.Dataset.from_tensor_slices(records).flat_map(one_by_one)
        fast = make(*records, careful=False).ignore_errors()
        return fast.concatenate(one_at_a_time.batch(size)).take(1)

    # The threads of native ops help each other; those of datasets have a batch each.
    at_once = _AT_ONCE if ends_at_once else preprocessing.threads
    image_batches = batches.interleave(
        batch, cycle_length=at_once, num_parallel_calls=at_once, deterministic=True
    )
    size = specs[0].shape[0]
    return image_batches.map(
        lambda *parts: tuple(tf.ensure_shape(part, [size, *part.shape[1:]]) for part in parts)
    )
