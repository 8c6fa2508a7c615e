"""Caches of training images in a host's memory, and copies of shards on its local disk.

Cached records and images are shuffled by their indices, so an epoch's order is cheap and the same
as without a cache. They stay in memory until other data is cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import tensorflow as tf
from tqdm import tqdm

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import open_new, temporary_beside
from imagenet_fast.base.paths import Path, is_local, to_local_path, to_path
from imagenet_fast.data.augmentation.augment import Changes, augment, draw_changes
from imagenet_fast.data.augmentation.options import AugmentationOptions
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.batches import evaluation_batches
from imagenet_fast.data.info import read_info
from imagenet_fast.data.options import DataOptions, SourceOptions
from imagenet_fast.data.order import SplitPart, part_reader
from imagenet_fast.data.pixel_options import PixelOptions
from imagenet_fast.data.shards import shard_reader

# Size and modification time of each file.
_States = tuple[tuple[int, int], ...]

_DECODED_AT_ONCE = 256
_COPIED_AT_ONCE = 16 * 2**20


def read_indices(path: tf.Tensor, count: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
    """Returns the indices of a shard's records in the cache, int64, instead of the records."""
    return tf.data.Dataset.range(start, start + count)


def records_from_memory(order: tf.data.Dataset, part: SplitPart, threads: int) -> tf.data.Dataset:
    """Returns batches of cached records of a part of a split, and identities.

    ``order`` has batches of indices, from :func:`read_indices`, and identities.
    """
    records = _records(part, _states(part), threads)
    return order.map(lambda indices, identities: (tf.gather(records, indices), identities))


def batches_from_memory(
    order: tf.data.Dataset,
    part: SplitPart,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
) -> tf.data.Dataset:
    """Returns the batches of ``batches.training_batches`` from cached images.

    The images of the part are cached decoded and resized, but not augmented: their crops must not
    be random, except by ``train_crop=pad``. ``order`` is as for :func:`records_from_memory`.
    """
    cached = images_of(part, "train", options, threads, bad_images)

    def batch(indices: tf.Tensor, identities: tf.Tensor) -> tuple[tf.Tensor, ...]:
        images, labels, weights = (tf.gather(tensor, indices) for tensor in cached)
        changes = draw_changes(identities, options)
        return (images, labels, weights, changes) if changes else (images, labels, weights)

    def augmented(
        images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, changes: Changes
    ) -> tf.data.Dataset:
        each = tf.data.Dataset.from_tensor_slices((images, changes))
        size = tf.shape(labels, tf.int64)[0]
        images = each.map(lambda image, changes: augment(image, changes, options)).batch(size)
        return tf.data.Dataset.zip((images, tf.data.Dataset.from_tensors((labels, weights))))

    batches = order.map(batch, num_parallel_calls=threads, deterministic=True)
    if len(batches.element_spec) == len(cached):
        return batches
    batches = batches.interleave(
        augmented, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )
    shape = [order.element_spec[0].shape[0], *cached[0].shape[1:]]
    return batches.map(lambda images, rest: (tf.ensure_shape(images, shape), *rest))


# Only the last: successive runs in a process should not add up their memory.
@functools.lru_cache(maxsize=1)
def _records(part: SplitPart, states: _States, threads: int) -> tf.Tensor:
    """Returns all records of a part, string [records]; reads again if ``states`` have changed."""
    read = part_reader(shard_reader(part.paths))

    def read_all(*shard: tf.Tensor) -> tf.Tensor:
        return read(*shard).batch(shard[-1]).get_single_element()

    # A shard whose images were all skipped has no records, of which no batch can be made.
    shards = part.shards().filter(lambda *shard: shard[-1] > 0)
    shards = shards.map(read_all, num_parallel_calls=threads, deterministic=True)
    with _announced(f"{part.examples} train records"):
        return shards.unbatch().batch(part.examples).get_single_element()


def images_of(
    part: SplitPart,
    split: str,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
) -> tuple[tf.Tensor, ...]:
    """Returns (images, labels, weights) of all records of a part, preprocessed as in evaluation.

    The ``split``, ``train`` or ``validation``, is for messages.
    """
    source, pixels = options.part(SourceOptions), options.part(PixelOptions)
    return _images_of(part, _states(part), split, source, pixels, threads, bad_images)


# Two: training and validation images.
@functools.lru_cache(maxsize=2)
def _images_of(
    part: SplitPart,
    states: _States,
    split: str,
    source: SourceOptions,
    pixels: PixelOptions,
    threads: int,
    bad_images: BadImages | None,
) -> tuple[tf.Tensor, ...]:
    """Returns the images of :func:`images_of`; reads again if ``states`` have changed."""
    count = part.examples
    read = part_reader(shard_reader(part.paths))
    records = part.shards().flat_map(read).batch(_DECODED_AT_ONCE)
    # Nothing is changed at random.
    options = AugmentationOptions(**vars(pixels))
    images = evaluation_batches(records, read_info(source), options, threads, bad_images).unbatch()
    with _announced(f"{count} {split} images, {count * 3 * options.image_size**2 / 1e6:.0f} MB"):
        return images.batch(count).get_single_element()


def _states(part: SplitPart) -> _States:
    """Returns the states of local shards, by which rewritten shards are recognized.

    In a bucket, this would take a request per shard.
    """
    stats = [to_path(path).stat() for path in part.paths if is_local(path)]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


@contextlib.contextmanager
def _announced(what: str) -> Iterator[None]:
    print(f"cache: reading {what}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    print(f"cache: read in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def copy_shards(part: SplitPart, directory: str) -> SplitPart:
    """Copies a part's shards to a local disk, unless they are there already.

    Each data set has a folder in ``directory``, which is created if it does not exist.

    Returns:
      The part with the paths of the copies.

    Raises:
      UserError: if a shard cannot be read or written.
    """
    copies = [_copy_path(to_path(path), directory) for path in part.paths]
    missing = [
        (path, copy)
        for path, copy in zip(map(to_path, part.paths), copies)
        if not copy.exists() or _size_and_time(copy) != _size_and_time(path)
    ]
    total = sum(path.stat().st_size for path, _ in missing)
    with tqdm(total=total, desc="cache_dir", unit="B", unit_scale=True, disable=not missing) as bar:
        for path, copy in missing:
            try:
                _copy(path, copy, bar)
            except OSError as error:
                raise UserError(
                    f"cache_dir: cannot copy {path} to {copy}: {error.strerror}"
                ) from error
    return dataclasses.replace(part, paths=tuple(map(str, copies)))


def _size_and_time(path: Path) -> tuple[int, int]:
    """Returns a file's size and its modification time in seconds, which copies inherit."""
    stat = path.stat()
    return stat.st_size, int(stat.st_mtime)


def _copy_path(path: Path, directory: str) -> pathlib.Path:
    """Returns the path of a shard's copy, in a folder named by the shard's directory."""
    source = path.resolve().parent
    folder = f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    return to_local_path(directory, "cache_dir") / folder / path.name


def _copy(path: Path, copy: pathlib.Path, bar: tqdm) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Another process on this host may copy the same file.
    temporary = temporary_beside(copy)
    try:
        with path.open("rb") as source, open_new(temporary) as target:
            while block := source.read(_COPIED_AT_ONCE):
                target.write(block)
                bar.update(len(block))
        written = path.stat().st_mtime
        os.utime(temporary, (written, written))
        temporary.replace(copy)
    finally:
        temporary.unlink(missing_ok=True)
