"""The input pipeline up to each of its stages, and decoding alone as its upper bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from imagenet_fast.data.batches import Plan, native_images, plan_training, training_batches
from imagenet_fast.data.dataset import distributed_dataset, thread_count, with_threads
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.image_ops import read_examples, with_resize_kernel
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.shards import load_records
from imagenet_fast.lab.benchmarks.input.source import training_records
from imagenet_fast.lab.benchmarks.input.variants import in_threads


def make_stages(options: InputOptions) -> dict[str, Iterable]:
    """Returns the pipeline up to each stage, by the stage's name.

    Stages before ``batch`` return numbers for each batch instead of its pixels.

    Raises:
      UserError: if there is no C++ compiler.
    """
    options = with_resize_kernel(options.replace(resize_kernel="native"))
    info = read_info(options)
    order = training_records(info, options, refer=True)
    threads = thread_count(options)

    def load(records: tf.Tensor, identities: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return load_records(records), identities

    def parse(records: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        limit = options.max_pixels
        return read_examples(records, with_index=True, from_headers=False, max_pixels=limit).labels

    def draw(records: tf.Tensor, identities: tf.Tensor) -> tf.Tensor:
        return plan_training(records, identities, info=info, options=options).boxes

    def decode(records: tf.Tensor, identities: tf.Tensor) -> tf.Tensor:
        plan = plan_training(records, identities, info=info, options=options)
        images, _ = native_images(plan._replace(changes={}), options)
        return images[:, 0, 0, 0]

    def mapped(dataset: tf.data.Dataset, make: Callable[..., Any]) -> tf.data.Dataset:
        return dataset.map(make, num_parallel_calls=threads, deterministic=True)

    read = mapped(order, load)
    datasets = {
        "order": order,
        "read": read,
        "parse": mapped(read, parse),
        "draw crops": mapped(read, draw),
        "decode and resize": mapped(read, decode),
        "batch": training_batches(order, info, options, threads),
    }
    stages: dict[str, Iterable] = {
        name: with_threads(dataset, threads) for name, dataset in datasets.items()
    }
    return {**stages, "transfer": distributed_dataset(options, "train")}


def make_bounds(options: InputOptions, count: int) -> dict[str, tf.data.Dataset]:
    """Returns datasets, by name, that make or decode images in memory, and return a part of them.

    ``count`` batches are in memory, the first ones of training.

    Raises:
      UserError: if there is no C++ compiler.
    """
    threads = thread_count(options)
    native = with_resize_kernel(options.replace(resize_kernel="native"))
    # The whole files, which is what others decode.
    others = options.replace(jpeg_index=False, resize_kernel="tensorflow")

    def make(plan: Plan) -> tf.Tensor:
        images, _ = native_images(plan._replace(changes={}), native)
        return images[:, 0, 0, 0]

    def fused(plan: Plan) -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(
            plan.encoded, plan.boxes, channels=3, dct_method="INTEGER_ACCURATE"
        )

    def whole(plan: Plan) -> tf.Tensor:
        return tf.io.decode_jpeg(plan.encoded, channels=3, dct_method="INTEGER_ACCURATE")

    def alone(decode: Callable[[Plan], tf.Tensor]) -> tf.data.Dataset:
        def batch(plan: Plan) -> tf.data.Dataset:
            images = tf.data.Dataset.from_tensor_slices(plan)
            return images.map(lambda image: tf.size(decode(image))).batch(options.batch_size)

        return in_threads(_plans(others, count), batch, options)

    bounds = {
        "crops made alone": _plans(native, count).map(make, num_parallel_calls=threads),
        "fused decode and crop alone": alone(fused),
        "whole decode alone": alone(whole),
    }
    return {name: with_threads(dataset, threads) for name, dataset in bounds.items()}


def _plans(options: InputOptions, count: int) -> tf.data.Dataset:
    """Returns plans of the first batches, held in memory and repeated."""
    info = read_info(options)
    records = training_records(info, options).take(count)
    plans = records.map(lambda *parts: plan_training(*parts, info=info, options=options))
    held = plans.batch(count).get_single_element()
    return tf.data.Dataset.from_tensor_slices(held).repeat()
