"""The input pipeline with some of its optimizations, for an ablation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from imagenet_fast.data import decode
from imagenet_fast.data.augmentation.augment import augment
from imagenet_fast.data.batches import Plan, make_image, plan_training, training_batches
from imagenet_fast.data.dataset import thread_count, with_threads
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.options import InputOptions
from imagenet_fast.lab.benchmarks.input.source import training_records

# The first four are those of Ying et al. 2018, where parsing is parallel.
OPTIMIZATIONS = {
    "cache": "encoded images in memory; without: files",
    "prefetch": "two prefetched batches; without: none",
    "fused": "decodes only the crop; without: the whole image, then crops",
    "threads": "a batch per thread; without: one thread",
    "batched": "parses examples and draws crops for a whole batch; without: one by one",
    "native": "makes a batch by one op; without: by TensorFlow's ops; only with fused and batched",
    "index": "decodes only the blocks around the crop, by JPEG indexes; only with native",
}
# The optimizations of each variant, by its name: all, all but one, one, and none.
VARIANTS: dict[str, tuple[str, ...]] = {
    "all": tuple(OPTIMIZATIONS),
    **{
        f"all but {name}": tuple(other for other in OPTIMIZATIONS if other != name)
        for name in OPTIMIZATIONS
    },
    **{f"{name} alone": (name,) for name in OPTIMIZATIONS if name != "index"},
    "none": (),
}


def make_variant(options: InputOptions, enabled: Collection[str]) -> tf.data.Dataset:
    """Returns training batches, made with the enabled optimizations.

    ``data_threads`` applies if ``threads`` is enabled.

    Returns:
      As ``batches.training_batches``.
    """
    native = {"native", "fused", "batched"} <= set(enabled)
    options = options.replace(
        jpeg_index=options.jpeg_index and native and "index" in enabled,
        cache="encoded" if "cache" in enabled else "none",
        data_threads=options.data_threads if "threads" in enabled else 1,
        resize_kernel="native" if native else "tensorflow",
    )
    threads = thread_count(options)
    info = read_info(options)
    order = training_records(info, options, refer=native)
    if "fused" in enabled and "batched" in enabled:
        dataset = training_batches(order, info, options, threads)
    elif "batched" in enabled:
        make = functools.partial(_example, options=options, fused=False)
        dataset = image_by_image(order, make, info, options)
    else:
        dataset = _one_by_one(order, info, options, fused="fused" in enabled)
    return with_threads(dataset.prefetch(2) if "prefetch" in enabled else dataset, threads)


def image_by_image(
    order: tf.data.Dataset, make: Callable[..., Any], info: DatasetInfo, options: InputOptions
) -> tf.data.Dataset:
    """Returns batches of ``make``'s results for each image's part of a :data:`batches.Plan`."""

    def batch(*records: tf.Tensor) -> tf.data.Dataset:
        planned = tf.data.Dataset.from_tensors(records).map(
            lambda *parts: plan_training(*parts, info=info, options=options)
        )
        images = planned.flat_map(tf.data.Dataset.from_tensor_slices)
        return images.map(make).batch(options.batch_size)

    return in_threads(order, batch, options)


def in_threads(
    dataset: tf.data.Dataset, make: Callable[..., tf.data.Dataset], options: InputOptions
) -> tf.data.Dataset:
    """Maps each element with ``make``, one element in each thread."""
    threads = thread_count(options)
    return dataset.interleave(
        make, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )


def _one_by_one(
    order: tf.data.Dataset, info: DatasetInfo, options: InputOptions, *, fused: bool
) -> tf.data.Dataset:
    """Parses each example and draws its crop separately."""

    def example(*parts: tf.Tensor) -> tuple[tf.Tensor, ...]:
        batch_of_one = (part[tf.newaxis] for part in parts)
        planned = plan_training(*batch_of_one, info=info, options=options)
        one = tf.nest.map_structure(lambda part: part[0], planned)
        return _example(one, options=options, fused=fused)

    threads = thread_count(options)
    made = order.unbatch().map(example, num_parallel_calls=threads, deterministic=True)
    return made.batch(options.batch_size)


# AutoGraph cannot convert Config's checks, and nothing here needs converting.
@tf.autograph.experimental.do_not_convert
def _example(
    plan: Plan, *, options: InputOptions, fused: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns what training has of an image, from its part of a plan."""
    encoded, box, changes = plan.encoded, plan.boxes, plan.changes
    if fused:
        image = make_image(encoded, box, changes, options)
    else:
        whole_box = tf.concat([[0, 0], image_size(encoded, options.max_pixels)], 0)
        whole = decode.decode_crop(encoded, whole_box, options)
        image = tf.slice(whole, [box[0], box[1], 0], [box[2], box[3], 3])
        image = augment(decode.resize(image, options), changes, options)
    return image, plan.labels, tf.constant(1.0)
