"""The input pipeline up to each of its stages, and decoding alone as its upper bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

from imagenet_fast.data import decode
from imagenet_fast.data.augmentation.augment import Changes
from imagenet_fast.data.batches import (
    make_image,
    parse_examples,
    plan_training,
    training_batches,
)
from imagenet_fast.data.dataset import distributed_dataset, thread_count, with_threads
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.resize_op import with_resize_kernel
from imagenet_fast.data.options import InputOptions
from imagenet_fast.lab.benchmarks.input.source import training_records
from imagenet_fast.lab.benchmarks.input.variants import image_by_image, in_threads


def make_stages(options: InputOptions) -> dict[str, Iterable]:
    """Returns the pipeline up to each stage, by the stage's name.

    Stages before ``batch`` return one number per image instead of its pixels.
    """
    options = with_resize_kernel(options)
    info = read_info(options)
    order = training_records(info, options)
    threads = thread_count(options)

    def parse(records: tf.Tensor, *_: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(records).map(lambda r: parse_examples(r, info, options))

    def draw(*records: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(records).map(
            lambda *parts: plan_training(*parts, info=info, options=options)
        )

    def decoded(
        encoded: tf.Tensor, _: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes
    ) -> tf.Tensor:
        return tf.size(decode.decode_cut_or_crop(encoded, box, is_cut, options)[0])

    def resized(
        encoded: tf.Tensor, _: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes
    ) -> tf.Tensor:
        return make_image(encoded, box, is_cut, {}, options)[0, 0, 0]

    def augmented(
        encoded: tf.Tensor, _: tf.Tensor, box: tf.Tensor, is_cut: tf.Tensor, changes: Changes
    ) -> tf.Tensor:
        return make_image(encoded, box, is_cut, changes, options)[0, 0, 0]

    datasets = {
        "read": order,
        "parse": in_threads(order, parse, options),
        "draw crops": in_threads(order, draw, options),
        "decode": image_by_image(order, decoded, info, options),
        "resize": image_by_image(order, resized, info, options),
        "augment": image_by_image(order, augmented, info, options),
        "batch": training_batches(order, info, options, threads),
    }
    stages: dict[str, Iterable] = {
        name: with_threads(dataset, threads) for name, dataset in datasets.items()
    }
    return {**stages, "transfer": distributed_dataset(options, "train")}


def make_bounds(options: InputOptions, count: int) -> dict[str, tf.data.Dataset]:
    """Returns datasets, by name, that only decode images in memory, and return their sizes.

    Args:
      options: of the data and of the decoder.
      count: batches to keep in memory, the first ones of training.
    """
    # Of the whole files, which is what others decode.
    options = options.replace(jpeg_index=False)
    info = read_info(options)
    records = training_records(info, options).take(count)
    # The encoded images and their boxes.
    planned = records.map(lambda *parts: plan_training(*parts, info=info, options=options)[0:3:2])
    parts = planned.batch(count).get_single_element()
    held = tf.data.Dataset.from_tensor_slices(parts).repeat()

    def fused(encoded: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        return tf.size(
            tf.image.decode_and_crop_jpeg(encoded, box, channels=3, dct_method="INTEGER_ACCURATE")
        )

    def whole(encoded: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return tf.size(tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE"))

    def alone(do: Callable[..., tf.Tensor]) -> tf.data.Dataset:
        def batch(*parts: tf.Tensor) -> tf.data.Dataset:
            images = tf.data.Dataset.from_tensor_slices(parts)
            return images.map(do).batch(options.batch_size)

        return with_threads(in_threads(held, batch, options), thread_count(options))

    return {"fused decode and crop alone": alone(fused), "whole decode alone": alone(whole)}
