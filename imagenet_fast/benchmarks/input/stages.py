"""The input pipeline up to each of its stages, and what no pipeline can be faster than."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

from imagenet_fast.benchmarks.input.source import training_records
from imagenet_fast.benchmarks.input.variants import image_by_image, in_threads
from imagenet_fast.config import Config
from imagenet_fast.data import decode
from imagenet_fast.data.augment import Changes
from imagenet_fast.data.batches import (
    make_image,
    parse_examples,
    plan_training,
    training_batches,
)
from imagenet_fast.data.info import read_info
from imagenet_fast.data.pipeline import make_dataset, thread_count, with_threads
from imagenet_fast.data.resize_op import with_resize_kernel


def make_stages(config: Config) -> dict[str, Iterable]:
    """Returns by name what each stage makes of all that come before it, batch by batch.

    Stages before ``batch`` give a number of each image instead of its pixels.
    """
    config = with_resize_kernel(config)
    info = read_info(config)
    order = training_records(info, config)
    threads = thread_count(config)

    def parse(records: tf.Tensor, identities: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(records).map(lambda r: parse_examples(r, info))

    def draw(*records: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(records).map(
            lambda texts, identities: plan_training(texts, identities, info, config)
        )

    def decoded(encoded: tf.Tensor, _: tf.Tensor, window: tf.Tensor, changes: Changes) -> tf.Tensor:
        return tf.size(decode.decode_crop(encoded, window, config))

    def resized(encoded: tf.Tensor, _: tf.Tensor, window: tf.Tensor, changes: Changes) -> tf.Tensor:
        return decode.decode_crop_and_resize(encoded, window, config)[0, 0, 0]

    def augmented(
        encoded: tf.Tensor, _: tf.Tensor, window: tf.Tensor, changes: Changes
    ) -> tf.Tensor:
        return make_image(encoded, window, changes, config)[0, 0, 0]

    datasets = {
        "read": order,
        "parse": in_threads(order, parse, config),
        "draw windows": in_threads(order, draw, config),
        "decode": image_by_image(order, decoded, info, config),
        "resize": image_by_image(order, resized, info, config),
        "augment": image_by_image(order, augmented, info, config),
        "batch": training_batches(order, info, config, threads),
    }
    stages: dict[str, Iterable] = {
        name: with_threads(dataset, threads) for name, dataset in datasets.items()
    }
    return {**stages, "transfer": make_dataset(config, "train")}


def make_bounds(config: Config, count: int) -> dict[str, tf.data.Dataset]:
    """Returns by name what only decodes images that are in memory, each to its number of pixels.

    Args:
      config: of the data and of the decoder.
      count: batches to hold: the first ones that training sees.
    """
    info = read_info(config)
    records = training_records(info, config).take(count)
    # The encoded images and their windows.
    planned = records.map(
        lambda texts, identities: plan_training(texts, identities, info, config)[0:3:2]
    )
    parts = planned.batch(count).get_single_element()
    held = tf.data.Dataset.from_tensor_slices(parts).repeat()

    def fused(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
        return tf.size(
            tf.image.decode_and_crop_jpeg(
                encoded, window, channels=3, dct_method="INTEGER_ACCURATE"
            )
        )

    def whole(encoded: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return tf.size(tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE"))

    def alone(do: Callable[..., tf.Tensor]) -> tf.data.Dataset:
        def batch(*parts: tf.Tensor) -> tf.data.Dataset:
            images = tf.data.Dataset.from_tensor_slices(parts)
            return images.map(do).batch(config.batch_size)

        return with_threads(in_threads(held, batch, config), thread_count(config))

    return {"fused decode and crop alone": alone(fused), "whole decode alone": alone(whole)}
