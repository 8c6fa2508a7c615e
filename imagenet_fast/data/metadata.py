"""Metadata of each image of a prepared data set: label, sizes, a digest and a perceptual hash.

``prepare`` computes it while images are decoded and writes it to ``data.npz`` beside the shards:
arrays with a value for each image, in the order of the manifest's shards and of their records, for
``numpy.load``. It can be recomputed from the shards; the perceptual hashes of images that were
converted to JPEG are then those of the JPEGs.
"""

from __future__ import annotations

import base64
import functools
import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np
from PIL import Image
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import MAX_ARRAYS, read_arrays
from imagenet_fast.base.paths import Path
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, Label, classes_of, decode_example, labels_of
from imagenet_fast.data.images import PNG_SIGNATURE, BadImageError, EncodedImage, normalize_encoding
from imagenet_fast.data.manifest import Manifest, Shard, digest_of

FILE = "data.npz"

# The perceptual hash has 16 x 16 bits. With the usual 8 x 8, thousands of pairs of Fashion-MNIST's
# images are as similar as a photograph and its copy at half the size.
_HASH_SIDE = 16
HASH_BITS = _HASH_SIDE**2
# Before hashing, images are shrunk by averaging blocks of pixels, which is fast, to at least this.
_MIN_SIDE = 128

# Images whose bits of classes are unpacked at once.
_UNPACKED_AT_ONCE = 2**16

# Explicitly little-endian, so that files are the same on every machine.
ROW = np.dtype(
    [
        ("label", "<i4"),  # the class, an index of the manifest's labels
        ("height", "<u4"),  # in pixels
        ("width", "<u4"),
        ("channels", "u1"),  # 1: greyscale, 3: RGB
        ("png", "?"),  # else JPEG
        ("bytes", "<u4"),  # of the image file
        ("record_bytes", "<u4"),  # of the record's data, which contains the file
        ("digest", "<u8"),  # equal for files that are equal byte for byte
        ("hashed", "?"),  # whether the library for the next was installed
        ("hash", "<u8", (HASH_BITS // 64,)),  # pHash: similar images differ in few bits
    ]
)


def row_type(num_classes: int, multi_label: bool) -> np.dtype:
    """Returns the dtype of an image's metadata.

    It is ``ROW``. Of multi-label data it also has ``classes``, a bit for each class, the first in
    the highest bit of the first byte, and ``label`` is the first class of an image, -1 without any.
    """
    if not multi_label:
        return ROW
    return np.dtype([*ROW.descr, ("classes", "u1", ((num_classes + 7) // 8,))])


def describe(image: EncodedImage, label: Label, record_bytes: int, row: np.dtype = ROW) -> tuple:
    """Returns the values of a row, of :func:`row_type`, for an image as it is stored.

    ``record_bytes`` is the length of its record's data.
    """
    hashed = perceptual_hash(image.pixels)
    classes: tuple[np.ndarray, ...] = ()
    if row != ROW:
        bits = np.zeros(8 * row["classes"].shape[0], bool)
        bits[list(classes_of(label))] = True
        classes = (np.packbits(bits),)
    return (
        min(classes_of(label), default=-1),
        image.height,
        image.width,
        image.channels,
        image.data.startswith(PNG_SIGNATURE),
        len(image.data),
        record_bytes,
        # A quarter of a cryptographic hash's time; collisions need not resist an attacker.
        google_crc32c.value(image.data) << 32 | zlib.adler32(image.data),
        hashed is not None,
        0 if hashed is None else hashed,
        *classes,
    )


def classes_in(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns places of images in ``rows`` and their classes, int64 [labels], in this order.

    An image is there once for each of its classes.
    """
    if "classes" not in (rows.dtype.names or ()):
        return np.arange(len(rows)), rows["label"].astype(np.int64)
    places, classes = [], []
    for start in range(0, len(rows), _UNPACKED_AT_ONCE):
        bits = np.unpackbits(rows["classes"][start : start + _UNPACKED_AT_ONCE], axis=1)
        found = np.nonzero(bits)
        places.append(start + found[0])
        classes.append(found[1])
    return np.concatenate(places), np.concatenate(classes)


def perceptual_hash(image: Image.Image) -> np.ndarray | None:
    """Returns the image's pHash as uint64 of shape (4,), or None if ImageHash is not installed."""
    phash = _phash()
    if phash is None:
        return None
    small = image.reduce(max(1, min(image.size) // _MIN_SIDE))
    bits = phash(small, hash_size=_HASH_SIDE).hash
    return np.packbits(bits.ravel()).view("<u8")


@functools.cache
def _phash() -> Callable | None:
    try:
        from imagehash import phash
    except ImportError:
        return None
    return phash


def pack(rows: list[tuple], row: np.dtype = ROW) -> str:
    """Returns the rows of a shard as text for a line of the journal."""
    return base64.b64encode(zlib.compress(np.array(rows, row).tobytes())).decode("ascii")


def unpack(text: str, images: int, row: np.dtype = ROW) -> np.ndarray | None:
    """Returns the rows that :func:`pack` encoded, of dtype ``row`` and shape (images,).

    None if the text is damaged, or has another number of rows.
    """
    size = images * row.itemsize
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text), min(size, MAX_ARRAYS) + 1)
    except (ValueError, zlib.error):
        return None
    return np.frombuffer(data, row) if stream.eof and len(data) == size else None


def write_metadata(manifest: Manifest, packed: Mapping[str, str], directory: Path) -> None:
    """Writes ``data.npz``; the same images give the same bytes.

    ``packed`` has the packed rows of each shard, by its name; missing ones are computed from the
    shards in the directory.

    Raises:
      OSError: it cannot be written.
      UserError: a shard cannot be read.
    """
    row = _row_of(manifest)
    rows = {s.file: unpack(packed.get(s.file, ""), s.examples, row) for s in manifest.shards}
    missing = [shard for shard in manifest.shards if rows[shard.file] is None]
    rows |= _read_shards(missing, manifest, directory, progress=False)
    _write(manifest, np.concatenate([rows[shard.file] for shard in manifest.shards]), directory)


def read_metadata(manifest: Manifest, directory: Path, progress: bool = True) -> np.ndarray:
    """Returns the metadata of all images of a data set, [images], of dtype :func:`row_type`.

    If ``data.npz`` is missing or out of date, or lacks hashes and ImageHash is installed, it is
    rewritten from the shards, which decodes all images.

    Args:
      manifest: of the data set.
      directory: of the shards and ``data.npz``.
      progress: whether to show a progress bar while shards are read.

    Raises:
      OSError: ``data.npz`` cannot be written.
      UserError: a shard cannot be read.
    """
    rows = _load(manifest, directory)
    if rows is None or (_phash() is not None and not rows["hashed"].all()):
        read = _read_shards(manifest.shards, manifest, directory, progress)
        rows = np.concatenate([read[shard.file] for shard in manifest.shards])
        _write(manifest, rows, directory)
    return rows


def read_classes(manifest: Manifest, split: str, directory: Path) -> np.ndarray:
    """Returns the class of each image of a split, int64 [images], in the order of the shards.

    It is not for multi-label data. If ``data.npz`` is missing or out of date, they are read from
    the shards.

    Raises:
      UserError: a shard cannot be read.
    """
    rows = _load(manifest, directory)
    files = [shard.file for shard in manifest.splits[split].shards]
    if rows is not None:
        of_split = [shard.file in files for shard in manifest.shards]
        counts = [shard.examples for shard in manifest.shards]
        classes = rows["label"][np.repeat(of_split, counts)].astype(np.int64)
        return _checked_classes(classes, manifest, split, directory)
    labels = []
    for file in files:
        for number, record in enumerate(records.read_records(directory / file)):
            try:
                (label,) = labels_of(decode_example(record), multi_label=False)
                labels.append(label + manifest.label_offset)
            except ValueError as error:
                raise UserError(f"{directory / file}: record {number}: {error}") from None
    return _checked_classes(np.array(labels, np.int64), manifest, split, directory)


def _checked_classes(
    classes: np.ndarray, manifest: Manifest, split: str, directory: Path
) -> np.ndarray:
    """Returns the classes of images, after comparing their numbers with the manifest's."""
    counts = np.array(manifest.splits[split].class_counts)
    known = classes.size and classes.min() >= 0 and classes.max() < len(counts)
    if not known or (np.bincount(classes, minlength=len(counts)) != counts).any():
        raise UserError(
            f"{directory}: the labels of {split} images are not those of the manifest: see "
            "`imagenet-fast prepare --verify`"
        )
    return classes


def update_record_bytes(
    old: Manifest, new: Manifest, sizes: Sequence[Sequence[int]], directory: Path
) -> None:
    """Updates ``data.npz`` after the shards were rewritten with the same images.

    It stays as it is if it was out of date before: :func:`read_metadata` recomputes it then. The
    ``sizes`` are those of the records' data, in bytes, for each shard.

    Raises:
      OSError: it cannot be written.
    """
    rows = _load(old, directory)
    if rows is not None:
        rows["record_bytes"] = np.concatenate(sizes)
        _write(new, rows, directory)


def _write(manifest: Manifest, rows: np.ndarray, directory: Path) -> None:
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: rows[name] for name in rows.dtype.names or ()}
    np.savez_compressed(file, shards=np.array(digest_of(manifest.shards)), **arrays)
    write_file(directory / FILE, file.getvalue())


def _load(manifest: Manifest, directory: Path) -> np.ndarray | None:
    try:
        arrays = read_arrays(directory / FILE)
        if str(arrays["shards"]) != digest_of(manifest.shards):
            return None  # out of date
        rows = np.empty(len(arrays["label"]), _row_of(manifest))
        if len(rows) != sum(shard.examples for shard in manifest.shards):
            return None
        for name in rows.dtype.names or ():
            rows[name] = arrays[name]
    # Missing, damaged or of another version: it is recomputed from the shards.
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        return None
    known = rows["label"] >= -int(manifest.multi_label)
    return rows if (known & (rows["label"] < manifest.num_classes)).all() else None


def _read_shards(
    shards: Iterable[Shard], manifest: Manifest, directory: Path, progress: bool
) -> dict[str, np.ndarray]:
    shards = list(shards)
    if not shards:
        return {}
    total = sum(shard.examples for shard in shards)
    found = {}
    pool = ThreadPoolExecutor(cpu_cores())
    try:
        with tqdm(total=total, desc="images", unit=" images", disable=not progress) as bar:
            for shard, rows in zip(
                shards,
                pool.map(lambda shard: _read_shard(directory / shard.file, manifest), shards),
            ):
                found[shard.file] = rows
                bar.update(len(rows))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _row_of(manifest: Manifest) -> np.dtype:
    return row_type(manifest.num_classes, manifest.multi_label)


def _read_shard(path: Path, manifest: Manifest) -> np.ndarray:
    rows, row = [], _row_of(manifest)
    for number, record in enumerate(records.read_records(path)):
        try:
            fields = decode_example(record)
            data = fields[ENCODED][0]
            # PNG is lossless, so that the pixels are those of the file.
            image = normalize_encoding(data, "png")._replace(data=data)
            stored = labels_of(fields, multi_label=manifest.multi_label)
            label = tuple(own + manifest.label_offset for own in stored)
            rows.append(describe(image, label, len(record), row))
        except (BadImageError, KeyError, IndexError, ValueError) as error:
            raise UserError(f"{path}: record {number}: {error}") from error
    return np.array(rows, row)
