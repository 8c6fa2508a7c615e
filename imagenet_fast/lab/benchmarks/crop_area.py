"""A benchmark of JPEG decoding by the area of the crop: with an index, and by other means."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import decode
from imagenet_fast.data.examples import ENCODED, decode_example
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.image_ops import make_images, with_resize_kernel
from imagenet_fast.data.jpeg.index import index_jpegs
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.records import read_records
from imagenet_fast.lab.benchmarks.decode import on_one_core
from imagenet_fast.lab.benchmarks.report import Report, aligned, cpu, spread_text, values_of
from imagenet_fast.lab.benchmarks.timing import Spread, Times, time_interleaved, timed

# Fractions of the image.
AREAS = (0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
INDEXED, CROPPED, WHOLE = "with an index", "decode_and_crop_jpeg", "whole image"

Decode = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class CropAreas:
    """Times of decoding and resizing crops of each area.

    Attributes:
      times: by area, then by decoder; each of all images.
      images: in a sample.
      image_size: height and width of the resized crops, in pixels.
      kilobytes: mean size of the JPEGs.
      index_bytes: mean size of their indexes.
    """

    times: Mapping[float, Mapping[str, Times]]
    images: int
    image_size: int
    kilobytes: float
    index_bytes: float

    def microseconds(self, area: float, decoder: str) -> Spread:
        """Returns the CPU time per image."""
        seconds = self.times[area][decoder].cpu_seconds
        return Spread.of([1e6 * value / self.images for value in seconds])

    def speedup(self, area: float, decoder: str) -> Spread:
        """Returns the CPU time of another decoder divided by that with an index."""
        times = self.times[area]
        pairs = zip(times[decoder].cpu_seconds, times[INDEXED].cpu_seconds)
        return Spread.of([other / indexed for other, indexed in pairs])


def compare_crop_areas(
    options: DataOptions, images: int, *, warmup: int, repeats: int
) -> CropAreas:
    """Times decoding and resizing of crops at random positions, by their area.

    Crops have their image's aspect ratio. Everything runs on one core. Whole images are decoded and
    resized by TensorFlow's ops.

    The JPEGs are the first ``images`` of the training shards that can have an index.

    Raises:
      UserError: if there is no data, or fewer such JPEGs in it, or no compiler for the ops.
    """
    options = with_resize_kernel(options)
    if options.resize_kernel != "native":
        raise UserError("benchmark crop_area needs a C++ compiler (g++) for the package's ops")
    encoded, indexes = _indexed_jpegs(options, images)
    sizes = tf.stack([image_size(image, options.max_pixels) for image in encoded]).numpy()
    random = np.random.default_rng(options.seed)
    decoders: dict[str, Decode] = {
        INDEXED: _natively(options, with_index=True),
        CROPPED: _natively(options, with_index=False),
        WHOLE: _whole(options),
    }
    calls = {}
    for area in AREAS:
        boxes = _boxes(sizes, area, random)
        for name, decoder in decoders.items():
            calls[area, name] = timed(_all_crops(decoder, encoded, indexes, boxes))
    times = time_interleaved(list(calls.values()), warmup=warmup, repeats=repeats)
    by_area: dict[float, dict[str, Times]] = {area: {} for area in AREAS}
    for (area, name), each in zip(calls, times):
        by_area[area][name] = each
    return CropAreas(
        by_area,
        images,
        options.image_size,
        float(np.mean([len(image.numpy()) for image in encoded])) / 1e3,
        float(np.mean([len(index.numpy()) for index in indexes])),
    )


def make_report(result: CropAreas) -> Report:
    """Returns the report: CPU time by area and decoder, and the ratios to that with an index."""
    return Report(_text(result), _values(result), lambda: _figure(result))


def _indexed_jpegs(
    options: DataOptions, images: int
) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
    paths = read_info(options).splits["train"].paths
    records = itertools.chain.from_iterable(map(read_records, paths))
    encoded, indexes = [], []
    for record in records:
        image = tf.constant(decode_example(record)[ENCODED][0])
        index = index_jpegs(image)
        if len(index.numpy()):
            encoded.append(image)
            indexes.append(index)
        if len(encoded) == images:
            return encoded, indexes
    raise UserError(
        f"{options.data_dir} has {len(encoded)} training JPEGs that can have an index, not {images}"
    )


def _boxes(sizes: np.ndarray, area: float, random: np.random.Generator) -> np.ndarray:
    """Returns random crop boxes of a fraction of each image, int32 [images, 4]."""
    extents = np.maximum(1, np.round(sizes * area**0.5)).astype(np.int32)
    corners = np.floor(random.random(sizes.shape) * (sizes - extents + 1)).astype(np.int32)
    return np.concatenate([corners, extents], 1)


def _natively(options: DataOptions, with_index: bool) -> Decode:
    def decoded(encoded: tf.Tensor, index: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        sizes = tf.stack([tf.strings.length(encoded), tf.strings.length(index) * int(with_index)])
        place = tf.cast(tf.stack([0, sizes[0], sizes[0], sizes[1]]), tf.int64)
        parts = (tf.strings.join([encoded, index]), place, box, tf.constant(False))
        images, _ = make_images(*(part[tf.newaxis] for part in parts), options=options)
        return images[0]

    return decoded


def _whole(options: DataOptions) -> Decode:
    def decoded(encoded: tf.Tensor, _: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        pixels = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
        crop = tf.slice(pixels, [box[0], box[1], 0], [box[2], box[3], 3])
        return decode.resize(crop, options)

    return decoded


def _all_crops(
    decoder: Decode,
    encoded: Sequence[tf.Tensor],
    indexes: Sequence[tf.Tensor],
    boxes: np.ndarray,
) -> Callable[[], Any]:
    """Returns a function that decodes and resizes all crops."""
    dataset = tf.data.Dataset.from_tensor_slices((list(encoded), list(indexes), boxes))
    dataset = dataset.map(lambda *parts: decoder(*parts)[0, 0, 0])
    dataset = on_one_core(dataset.batch(len(encoded)))
    return lambda: dataset.get_single_element().numpy()


def _title(result: CropAreas) -> str:
    return (
        f"{result.images} crops of JPEGs of {result.kilobytes:.0f} kB (indexes: "
        f"{result.index_bytes / 1e3:.1f} kB), resized to {result.image_size} x "
        f"{result.image_size}, one core"
    )


def _text(result: CropAreas) -> str:
    rows = [["crop, % of image", "CPU us/image", CROPPED, WHOLE, f"speed to {CROPPED}", "to whole"]]
    for area in AREAS:
        row = [f"{100 * area:.0f}"]
        row += [
            f"{result.microseconds(area, name).median:,.0f}" for name in (INDEXED, CROPPED, WHOLE)
        ]
        row += [spread_text(result.speedup(area, name), ".2f") for name in (CROPPED, WHOLE)]
        rows.append(row)
    repeats = len(result.times[AREAS[0]][INDEXED].seconds)
    return "\n".join(
        [_title(result), *aligned(rows), "", f"medians of {repeats} repeats, on {cpu()}"]
    )


def _values(result: CropAreas) -> dict[str, Any]:
    areas = {
        str(area): {
            name: {
                "cpu_microseconds_per_image": result.microseconds(area, name),
                "each_cpu_seconds": values_of(times.cpu_seconds),
                "each_seconds": values_of(times.seconds),
            }
            for name, times in result.times[area].items()
        }
        for area in AREAS
    }
    return {
        "title": _title(result),
        "n": len(result.times[AREAS[0]][INDEXED].seconds),
        "images": result.images,
        "kilobytes": result.kilobytes,
        "index_bytes": result.index_bytes,
        "areas": areas,
    }


def _figure(result: CropAreas) -> Figure:
    """Draws the CPU time of each decoder against the area, with the range."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    percent = [100 * area for area in AREAS]
    for name in (WHOLE, CROPPED, INDEXED):
        spreads = [result.microseconds(area, name) for area in AREAS]
        (line,) = axes.plot(percent, [spread.median for spread in spreads], "o-", label=name)
        low, high = [s.min for s in spreads], [s.max for s in spreads]
        axes.fill_between(percent, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 102)
    axes.set_xlabel("area of the crop, percent of the image")
    axes.set_ylabel("CPU time to decode and resize, µs per image")
    axes.set_title(_title(result), fontsize=9, loc="left")
    axes.legend(frameon=False)
    return figure
