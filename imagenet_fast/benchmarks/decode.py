"""What the options for decoding JPEGs cost: their time, and how far pixels are from Pillow's."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.benchmarks.timing import Comparison, take_turns, timed
from imagenet_fast.config import Config
from imagenet_fast.data import decode
from imagenet_fast.data.crop_boxes import training_crop_boxes
from imagenet_fast.data.examples import ENCODED, decode_example
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.info import read_info
from imagenet_fast.data.records import read_records
from imagenet_fast.data.resize_op import with_resize_kernel

# By name: the options, of which the first ones are the defaults.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "jpeg_dct=fast": {"jpeg_dct": "fast"},
    "jpeg_upsampling=plain": {"jpeg_upsampling": "plain"},
    "jpeg_scaling": {"jpeg_scaling": True},
    "all three": {"jpeg_dct": "fast", "jpeg_upsampling": "plain", "jpeg_scaling": True},
}


def compare_decoding(config: Config, images: int, *, warmup: int, repeats: int) -> Comparison:
    """Decodes and resizes random crops of training images in each of :data:`WAYS`, in turns.

    All on one core: what is compared is the work for an image.

    Args:
      config: names the data; gives the size of images, the crops and the interpolation.
      images: the first ones of the training shards.
      warmup: turns that do not count at first.
      repeats: turns that count.

    Raises:
      UserError: if there is no data, or fewer JPEGs in it.
    """
    config = with_resize_kernel(config)
    encoded = _jpegs(config, images)
    sizes = tf.stack([image_size(image, config.max_pixels) for image in encoded])
    identities = tf.stack([tf.zeros(images, tf.int64)] * 2 + [tf.range(images, dtype=tf.int64)], 1)
    boxes = training_crop_boxes(sizes, identities, config)
    calls = {name: _decoder(encoded, boxes, config.replace(**way)) for name, way in WAYS.items()}
    exact = _as_pillow(encoded, boxes.numpy(), config)
    notes = ["Difference from Pillow's pixels, in levels of 0 to 255:"]
    for name, call in calls.items():
        difference = np.abs(call().astype(int) - exact)
        notes.append(
            f"  {name}: {difference.mean():.3f} on average, at most "
            f"{np.percentile(difference, 99.9):.0f} in 99.9% of all, {difference.max()} in the rest"
        )
    times = take_turns([timed(call) for call in calls.values()], warmup=warmup, repeats=repeats)
    title = (
        f"{images} crops of JPEGs of {np.mean([len(one.numpy()) for one in encoded]) / 1e3:.0f} "
        f"kB to {config.image_size} x {config.image_size}, {config.resize_method}, one core"
    )
    return Comparison(title, tuple(notes), tuple(calls), times, images)


def _jpegs(config: Config, images: int) -> list[tf.Tensor]:
    paths = read_info(config).splits["train"].paths
    records = itertools.chain.from_iterable(map(read_records, paths))
    encoded = (decode_example(record)[ENCODED][0] for record in records)
    found = list(itertools.islice((one for one in encoded if one[:2] == b"\xff\xd8"), images))
    if len(found) < images:
        raise UserError(f"{config.data_dir} has {len(found)} JPEGs to train on, not {images}")
    return [tf.constant(one) for one in found]


def _decoder(
    encoded: Sequence[tf.Tensor], boxes: tf.Tensor, config: Config
) -> Callable[[], np.ndarray]:
    """Returns a function that decodes all crops: uint8 [images, image_size, image_size, 3]."""
    dataset = tf.data.Dataset.from_tensor_slices((list(encoded), boxes))
    dataset = dataset.map(lambda image, box: decode.decode_crop_and_resize(image, box, config))
    dataset = dataset.batch(len(encoded))
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    return lambda: dataset.get_single_element().numpy()


def _as_pillow(encoded: Sequence[tf.Tensor], boxes: np.ndarray, config: Config) -> np.ndarray:
    """Returns the same pixels of images that Pillow has decoded, int [images, size, size, 3]."""
    images = []
    for one, (top, left, height, width) in zip(encoded, boxes):
        pixels = np.asarray(Image.open(io.BytesIO(one.numpy())).convert("RGB"))
        crop = pixels[top : top + height, left : left + width]
        images.append(decode.resize(crop, config).numpy())
    return np.stack(images).astype(int)
