"""The input pipeline with some of its optimizations only, to see what each is worth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from imagenet_fast.benchmarks.input.source import training_records
from imagenet_fast.config import Config
from imagenet_fast.data import decode
from imagenet_fast.data.augment import Changes, augment
from imagenet_fast.data.batches import make_image, plan_training, training_batches
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.pipeline import thread_count, with_threads

# The first four are those of Ying et al. 2018, where parsing is parallel.
OPTIMIZATIONS = {
    "cache": "encoded images in memory; without: files",
    "prefetch": "two batches ready; without: none, but those that threads work on",
    "fused": "decoding only the crop; without: decoding the whole image, then cropping",
    "threads": "a batch in each thread; without: one thread",
    "batched": "examples parsed and crop boxes drawn for a batch at once; without: one by one",
    "native": "resizing by an op of our own; without: by TensorFlow's",
}


def names_of_variants() -> dict[str, tuple[str, ...]]:
    """Returns by name the optimizations of each variant: all, all but one, one, and none."""
    everything = tuple(OPTIMIZATIONS)
    variants = {"all": everything}
    for name in everything:
        variants[f"all but {name}"] = tuple(other for other in everything if other != name)
    for name in everything:
        variants[f"{name} alone"] = (name,)
    return {**variants, "none": ()}


def make_variant(config: Config, on: Collection[str]) -> tf.data.Dataset:
    """Returns training batches, made with the optimizations that are on.

    Args:
      config: of the data; its ``data_threads`` are those of ``threads``.
      on: some of :data:`OPTIMIZATIONS`.

    Returns:
      As ``batches.training_batches``.
    """
    config = config.replace(
        cache="encoded" if "cache" in on else "none",
        data_threads=config.data_threads if "threads" in on else 1,
        resize_kernel="native" if "native" in on else "tensorflow",
    )
    threads = thread_count(config)
    info = read_info(config)
    order = training_records(info, config)
    if "fused" in on and "batched" in on:
        dataset = training_batches(order, info, config, threads)
    elif "batched" in on:
        do = functools.partial(_example, config=config, fused=False)
        dataset = image_by_image(order, do, info, config)
    else:
        dataset = _one_by_one(order, info, config, fused="fused" in on)
    return with_threads(dataset.prefetch(2) if "prefetch" in on else dataset, threads)


def image_by_image(
    order: tf.data.Dataset, do: Callable[..., Any], info: DatasetInfo, config: Config
) -> tf.data.Dataset:
    """Returns batches of what ``do`` makes of each image's part of a :data:`batches.Plan`."""

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        planned = tf.data.Dataset.from_tensors(records).map(
            lambda texts, identities: plan_training(texts, identities, info, config)
        )
        images = planned.flat_map(lambda *p: tf.data.Dataset.from_tensor_slices(p))
        return images.map(do).batch(config.batch_size)

    return in_threads(order, batch, config)


def in_threads(
    dataset: tf.data.Dataset, make: Callable[..., tf.data.Dataset], config: Config
) -> tf.data.Dataset:
    """Makes of each element what ``make`` says, in one thread, and several at a time."""
    threads = thread_count(config)
    return dataset.interleave(
        make, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )


def _one_by_one(
    order: tf.data.Dataset, info: DatasetInfo, config: Config, *, fused: bool
) -> tf.data.Dataset:
    """Parses each example and draws its crop box by itself."""

    def example(record: tf.Tensor, identity: tf.Tensor) -> tuple[tf.Tensor, ...]:
        planned = plan_training(record[tf.newaxis], identity[tf.newaxis], info, config)
        one = tf.nest.map_structure(lambda part: part[0], planned)
        return _example(*one, config=config, fused=fused)

    threads = thread_count(config)
    made = order.unbatch().map(example, num_parallel_calls=threads, deterministic=True)
    return made.batch(config.batch_size)


def _example(
    encoded: tf.Tensor,
    label: tf.Tensor,
    box: tf.Tensor,
    changes: Changes,
    *,
    config: Config,
    fused: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    if fused:
        image = make_image(encoded, box, changes, config)
    else:
        box_of_all = tf.concat([[0, 0], image_size(encoded, config.max_pixels)], 0)
        whole = decode.decode_crop(encoded, box_of_all, config.replace(jpeg_scaling=False))
        image = tf.slice(whole, [box[0], box[1], 0], [box[2], box[3], 3])
        image = augment(decode.resize(image, config), changes, config)
    return image, label, tf.constant(1.0)
