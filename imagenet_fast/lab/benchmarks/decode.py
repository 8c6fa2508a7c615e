"""A benchmark of JPEG-decoding options: their speed, and their difference from Pillow."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import decode
from imagenet_fast.data.augmentation.crop_boxes import training_crop_boxes
from imagenet_fast.data.examples import ENCODED, decode_example
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.image_ops import make_images, with_resize_kernel
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.records import read_records
from imagenet_fast.lab.benchmarks.timing import Comparison, time_interleaved, timed

# The options of each variant, by its name.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "jpeg_dct=fast": {"jpeg_dct": "fast"},
    "jpeg_upsampling=plain": {"jpeg_upsampling": "plain"},
    "jpeg_scaling": {"jpeg_scaling": True},
    "all three": {"jpeg_dct": "fast", "jpeg_upsampling": "plain", "jpeg_scaling": True},
}


def compare_decoding(options: DataOptions, images: int, *, warmup: int, repeats: int) -> Comparison:
    """Times decoding and resizing of random training crops with each of :data:`VARIANTS`.

    Everything runs on one core, so that the work per image is compared.

    The JPEGs are the first ``images`` of the training shards.

    Raises:
      UserError: if there is no data, or fewer JPEGs in it.
    """
    options = with_resize_kernel(options)
    encoded = _jpegs(options, images)
    sizes = tf.stack([image_size(image, options.max_pixels) for image in encoded])
    identities = tf.stack([tf.zeros(images, tf.int64)] * 2 + [tf.range(images, dtype=tf.int64)], 1)
    boxes = training_crop_boxes(sizes, identities, options)
    calls = {
        name: _decoder(encoded, boxes, options.replace(**changes))
        for name, changes in VARIANTS.items()
    }
    exact = _pillow_pixels(encoded, boxes.numpy(), options)
    notes = ["Difference from Pillow's pixels, in levels of 0 to 255:"]
    for name, call in calls.items():
        difference = np.abs(call().astype(int) - exact)
        notes.append(
            f"  {name}: {difference.mean():.3f} on average, 99.9th percentile "
            f"{np.percentile(difference, 99.9):.0f}, maximum {difference.max()}"
        )
    times = time_interleaved(
        [timed(call) for call in calls.values()], warmup=warmup, repeats=repeats
    )
    kilobytes = np.mean([len(image.numpy()) for image in encoded]) / 1e3
    title = (
        f"{images} crops of JPEGs of {kilobytes:.0f} kB, resized to {options.image_size} x "
        f"{options.image_size}, {options.resize_method}, one core"
    )
    return Comparison(title, tuple(notes), tuple(calls), times, images)


def on_one_core(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset, run by a single thread."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return dataset.with_options(options)


def _jpegs(options: DataOptions, images: int) -> list[tf.Tensor]:
    paths = read_info(options).splits["train"].paths
    records = itertools.chain.from_iterable(map(read_records, paths))
    encoded = (decode_example(record)[ENCODED][0] for record in records)
    jpegs = list(itertools.islice((file for file in encoded if file[:2] == b"\xff\xd8"), images))
    if len(jpegs) < images:
        raise UserError(f"{options.data_dir} has {len(jpegs)} training JPEGs, not {images}")
    return [tf.constant(file) for file in jpegs]


def _decoder(
    encoded: Sequence[tf.Tensor], boxes: tf.Tensor, options: DataOptions
) -> Callable[[], np.ndarray]:
    """Returns a function that decodes all crops: uint8 [images, image_size, image_size, 3]."""
    if options.resize_kernel == "native":
        places = [[0, len(file.numpy()), 0, 0] for file in encoded]
        batch = (list(encoded), tf.constant(places, tf.int64), boxes, [False] * len(encoded))
        dataset = tf.data.Dataset.from_tensors(batch)
        dataset = dataset.map(lambda *parts: make_images(*parts, options=options)[0])
    else:
        dataset = tf.data.Dataset.from_tensor_slices((list(encoded), boxes))
        dataset = dataset.map(lambda image, box: decode.decode_crop_and_resize(image, box, options))
        dataset = dataset.batch(len(encoded))
    dataset = on_one_core(dataset)
    return lambda: dataset.get_single_element().numpy()


def _pillow_pixels(
    encoded: Sequence[tf.Tensor], boxes: np.ndarray, options: DataOptions
) -> np.ndarray:
    """Returns the same crops, decoded by Pillow, int [images, size, size, 3]."""
    images = []
    for image, (top, left, height, width) in zip(encoded, boxes):
        pixels = np.asarray(Image.open(io.BytesIO(image.numpy())).convert("RGB"))
        crop = pixels[top : top + height, left : left + width]
        images.append(decode.resize(crop, options).numpy())
    return np.stack(images).astype(int)
