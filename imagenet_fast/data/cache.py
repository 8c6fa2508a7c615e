"""Training images that a host holds in memory, or on a disk of its own.

What is in memory is put into order by its indices, so that an epoch's order costs next to nothing
and is the same with and without a cache. It is held until that of other data takes its place.
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
from imagenet_fast.base.paths import Path, is_local, to_local_path, to_path
from imagenet_fast.data.augment import Changes, augment, draw_changes
from imagenet_fast.data.bad_images import BadImages
from imagenet_fast.data.batches import evaluation_batches, uses_jpeg_index
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, WIDTH
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg_index import LEAST_PIXELS, index_jpegs
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.order import Share, own_records
from imagenet_fast.data.shards import read_shard

# Size and time of the last change of each file.
_States = tuple[tuple[int, int], ...]

# What images depend on before anything random is done to them.
_PREPARATION = (
    "data_dir",
    "num_classes",
    "label_offset",
    "image_size",
    "eval_crop_fraction",
    "resize_method",
    "antialias",
    "resize_kernel",
    "jpeg_dct",
    "jpeg_scaling",
    "jpeg_index",
    "jpeg_upsampling",
    "max_pixels",
)
_DECODED_AT_ONCE = 256
_INDEXED_AT_ONCE = 64
_INDEXED = {
    ENCODED: tf.io.FixedLenFeature([], tf.string),
    JPEG_INDEX: tf.io.FixedLenFeature([], tf.string, default_value=""),
    HEIGHT: tf.io.FixedLenFeature([], tf.int64, default_value=0),
    WIDTH: tf.io.FixedLenFeature([], tf.int64, default_value=0),
}
_COPIED_AT_ONCE = 16 * 2**20


def read_indices(path: tf.Tensor, count: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
    """Returns a shard's places in what the functions below hold, int64, in place of its records."""
    return tf.data.Dataset.range(start, start + count)


def records_from_memory(
    order: tf.data.Dataset, share: Share, options: DataOptions, threads: int
) -> tf.data.Dataset:
    """Returns batches of records and identities, from batches of indices and identities.

    Args:
      order: of :func:`read_indices`.
      share: whose records to hold.
      options: says whether to index JPEGs whose records have no index; a batch then has a third
        part, their indexes, string [batch], empty for other records.
      threads: that read them.
    """
    states = _states(share)
    records = _records(share, states, threads)
    if not uses_jpeg_index(options):
        return order.map(lambda indices, identities: (tf.gather(records, indices), identities))
    indexes = _indexes(share, states, threads)
    return order.map(
        lambda indices, identities: (
            tf.gather(records, indices),
            identities,
            tf.gather(indexes, indices),
        )
    )


def batches_from_memory(
    order: tf.data.Dataset,
    share: Share,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
) -> tf.data.Dataset:
    """Returns what ``batches.training_batches`` does, from batches of indices and identities.

    Args:
      order: of :func:`read_indices`.
      share: whose images to hold, as they are before anything random is done to them.
      options: says what becomes of an image; its window must not be random.
      threads: that decode, and later change, the images.
      bad_images: where to list those that cannot be read.
    """
    parts = images_of(share, "train", options, threads, bad_images)

    def batch(indices: tf.Tensor, identities: tf.Tensor) -> tuple[tf.Tensor, ...]:
        images, labels, weights = (tf.gather(part, indices) for part in parts)
        changes = draw_changes(identities, options)
        return (images, labels, weights, changes) if changes else (images, labels, weights)

    def changed(
        images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, changes: Changes
    ) -> tf.data.Dataset:
        each = tf.data.Dataset.from_tensor_slices((images, changes))
        size = tf.shape(labels, tf.int64)[0]
        images = each.map(lambda image, own: augment(image, own, options)).batch(size)
        return tf.data.Dataset.zip((images, tf.data.Dataset.from_tensors((labels, weights))))

    batches = order.map(batch, num_parallel_calls=threads, deterministic=True)
    if len(batches.element_spec) == len(parts):
        return batches
    made = batches.interleave(
        changed, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )
    shape = [order.element_spec[0].shape[0], *parts[0].shape[1:]]
    return made.map(lambda images, rest: (tf.ensure_shape(images, shape), *rest))


# The last one, that runs after another in a process do not need the memory of all.
@functools.lru_cache(maxsize=1)
def _records(share: Share, states: _States, threads: int) -> tf.Tensor:
    """Returns all records of the share's shards, string [records].

    Those of shards in other states are others: they are read anew.
    """
    read = own_records(read_shard)

    def read_all(*shard: tf.Tensor) -> tf.Tensor:
        return read(*shard).batch(shard[-1]).get_single_element()

    # Nothing makes a batch of no records, which is what a shard has whose images were all bad.
    shards = share.shards().filter(lambda *shard: shard[-1] > 0)
    shards = shards.map(read_all, num_parallel_calls=threads, deterministic=True)
    with _announced(f"{share.examples} train records"):
        return shards.unbatch().batch(share.examples).get_single_element()


@functools.lru_cache(maxsize=1)
def _indexes(share: Share, states: _States, threads: int) -> tf.Tensor:
    """Returns the indexes of JPEGs that :func:`_records` have none of, string [records]."""

    def index(records: tf.Tensor) -> tf.Tensor:
        examples = tf.io.parse_example(records, _INDEXED)
        pixels = examples[HEIGHT] * examples[WIDTH]  # 0: it does not say
        needs = (examples[JPEG_INDEX] == "") & ((pixels == 0) | (pixels >= LEAST_PIXELS))
        return index_jpegs(tf.where(needs, examples[ENCODED], ""))

    def index_one(record: tf.Tensor) -> tf.data.Dataset:
        indexed = tf.data.Dataset.from_tensors(record[tf.newaxis]).map(index).ignore_errors()
        return indexed.concatenate(tf.data.Dataset.from_tensors(tf.constant([""]))).take(1)

    def index_batch(records: tf.Tensor) -> tf.data.Dataset:
        indexed = tf.data.Dataset.from_tensors(records).map(index).ignore_errors()
        # Where a record is no example, all of the batch fail.
        one_by_one = tf.data.Dataset.from_tensor_slices(records).flat_map(index_one).unbatch()
        return indexed.concatenate(one_by_one.batch(_INDEXED_AT_ONCE)).take(1)

    batches = tf.data.Dataset.from_tensor_slices(_records(share, states, threads))
    indexes = batches.batch(_INDEXED_AT_ONCE).interleave(
        index_batch, cycle_length=threads, num_parallel_calls=threads, deterministic=True
    )
    return indexes.unbatch().batch(share.examples).get_single_element()


def images_of(
    share: Share,
    split: str,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None = None,
) -> tuple[tf.Tensor, ...]:
    """Returns (images, labels, weights) of all records of the share's shards.

    They are as evaluation sees them, and held until others are asked for.

    Args:
      share: whose shards.
      split: ``train`` or ``validation``, to be told.
      options: says what becomes of an image.
      threads: that decode.
      bad_images: where to list those that cannot be read.
    """
    prepared = DataOptions(**{name: getattr(options, name) for name in _PREPARATION}, batch_size=1)
    return _images_of(share, _states(share), split, prepared, threads, bad_images)


# Those of training and of validation.
@functools.lru_cache(maxsize=2)
def _images_of(
    share: Share,
    states: _States,
    split: str,
    options: DataOptions,
    threads: int,
    bad_images: BadImages | None,
) -> tuple[tf.Tensor, ...]:
    """Returns what :func:`images_of` does, with ``states`` as :func:`_records` has them."""
    count = share.examples
    read = own_records(read_shard)
    records = share.shards().flat_map(read).batch(_DECODED_AT_ONCE)
    images = evaluation_batches(records, read_info(options), options, threads, bad_images).unbatch()
    with _announced(f"{count} {split} images, {count * 3 * options.image_size**2 / 1e6:.0f} MB"):
        return images.batch(count).get_single_element()


def _states(share: Share) -> _States:
    """Returns what tells shards from those that were there before under the same names.

    In a bucket that would be a request for each.
    """
    stats = [to_path(path).stat() for path in share.paths if is_local(path)]
    return tuple((own.st_size, own.st_mtime_ns) for own in stats)


@contextlib.contextmanager
def _announced(what: str) -> Iterator[None]:
    print(f"cache: reading {what}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    print(f"cache: read in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def copy_shards(share: Share, directory: str) -> Share:
    """Copies shards to a local disk, except those that are there already.

    Args:
      share: whose shards.
      directory: where to, in a folder for each data set; made if it does not exist.

    Returns:
      The same share of the copies.

    Raises:
      UserError: if they cannot be read or written.
    """
    copies = [_copy_path(to_path(path), directory) for path in share.paths]
    missing = [
        (path, copy)
        for path, copy in zip(map(to_path, share.paths), copies)
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
    return dataclasses.replace(share, paths=tuple(map(str, copies)))


def _size_and_time(path: Path) -> tuple[int, int]:
    """Returns a file's size, and the second in which it was written, which a copy has from it."""
    found = path.stat()
    return found.st_size, int(found.st_mtime)


def _copy_path(path: Path, directory: str) -> pathlib.Path:
    """Returns where a shard's copy is: apart from those of other data sets of the same names."""
    source = path.resolve().parent
    folder = f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    return to_local_path(directory, "cache_dir") / folder / path.name


def _copy(path: Path, copy: pathlib.Path, bar: tqdm) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Another process of this host may copy the same file.
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            while block := source.read(_COPIED_AT_ONCE):
                target.write(block)
                bar.update(len(block))
        written = path.stat().st_mtime
        os.utime(temporary, (written, written))
        temporary.replace(copy)
    finally:
        temporary.unlink(missing_ok=True)
