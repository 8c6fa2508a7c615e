"""What is known of each image of a prepared data set: sizes, a digest and a perceptual hash.

``prepare`` collects it on the way, while it has each image decoded, and keeps it beside the shards
in ``data.npz``: arrays with a value an image, in the order of the manifest's shards and of the
records in them. ``numpy.load`` reads it. It can be made again from the shards; hashes of images
that were converted to JPEGs are then those of the JPEGs.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np
from PIL import Image
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.paths import Path
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, LABEL, decode_example
from imagenet_fast.data.images import PNG_SIGNATURE, BadImageError, EncodedImage, normalize_encoding
from imagenet_fast.data.manifest import Manifest, Shard

FILE = "data.npz"

# The perceptual hash has as many bits each way. With 8, as is usual, thousands of Fashion-MNIST's
# images would be as near to each other as a photograph is to itself at half its size.
_HASH_SIDE = 16
HASH_BITS = _HASH_SIDE**2
# Before it is hashed, an image is made smaller by averaging pixels, which is fast, to no less.
_LEAST_SIDE = 128

# Little-endian on every machine, as the files are to be.
ROW = np.dtype(
    [
        ("label", "<i4"),  # a class, an index of the manifest's labels
        ("height", "<u4"),  # in pixels
        ("width", "<u4"),
        ("channels", "u1"),  # 1: grey, 3: RGB
        ("png", "?"),  # or a JPEG
        ("bytes", "<u4"),  # of the image file
        ("record_bytes", "<u4"),  # of the record's data, which holds the file
        ("digest", "<u8"),  # equal where the files are equal byte for byte
        ("hashed", "?"),  # whether there was a library for the next
        ("hash", "<u8", (HASH_BITS // 64,)),  # perceptual: few bits differ where images look alike
    ]
)
_NAMES = ROW.names or ()


def describe(image: EncodedImage, pixels: Image.Image, label: int, record_bytes: int) -> tuple:
    """Returns the values of ``ROW`` for an image.

    Args:
      image: The image, as it is stored.
      pixels: The same, decoded, in the mode ``L`` or ``RGB``.
      label: Its class.
      record_bytes: The length of its record's data.
    """
    hashed = perceptual_hash(pixels)
    return (
        label,
        image.height,
        image.width,
        image.channels,
        image.data.startswith(PNG_SIGNATURE),
        len(image.data),
        record_bytes,
        # A quarter of a cryptographic digest's time: nobody is to be kept from making two equal.
        google_crc32c.value(image.data) << 32 | zlib.adler32(image.data),
        hashed is not None,
        0 if hashed is None else hashed,
    )


def perceptual_hash(image: Image.Image) -> np.ndarray | None:
    """Returns the image's pHash as uint64 of shape (4,); None without the library ImageHash."""
    phash = _phash()
    if phash is None:
        return None
    small = image.reduce(max(1, min(image.size) // _LEAST_SIDE))
    bits = phash(small, hash_size=_HASH_SIDE).hash
    return np.packbits(bits.ravel()).view("<u8")


@functools.cache
def _phash() -> Callable | None:
    try:
        from imagehash import phash
    except ImportError:
        return None
    return phash


def pack(rows: list[tuple]) -> str:
    """Returns the images of a shard as text for a line of the journal."""
    return base64.b64encode(zlib.compress(np.array(rows, ROW).tobytes())).decode("ascii")


def unpack(text: str) -> np.ndarray:
    """Returns what was packed, of dtype ``ROW`` and shape (images,)."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), ROW)


def write_facts(manifest: Manifest, packed: Mapping[str, str], directory: Path) -> None:
    """Writes ``data.npz``, the same bytes for the same images.

    Args:
      manifest: Of the data set.
      packed: By the name of a shard, its images; shards that are missing are read.
      directory: Of the shards.

    Raises:
      OSError: It cannot be written.
      UserError: A shard cannot be read.
    """
    shards = _shards(manifest)
    missing = [shard for shard in shards if not packed.get(shard.file)]
    read = _read_shards(missing, manifest.label_offset, directory, progress=False)
    rows = [
        read[shard.file] if shard.file in read else unpack(packed[shard.file]) for shard in shards
    ]
    _write(manifest, np.concatenate(rows), directory)


def read_facts(manifest: Manifest, directory: Path, progress: bool = True) -> np.ndarray:
    """Returns the images of a data set, of dtype ``ROW`` and shape (images,).

    If they are not in ``data.npz``, or without hashes that there can be now, all shards are read
    and their images decoded, and it is written.

    Args:
      manifest: Of the data set.
      directory: Where both are.
      progress: Show a progress bar where shards are read.

    Raises:
      OSError: They cannot be written.
      UserError: A shard cannot be read.
    """
    rows = _load(manifest, directory)
    if rows is None or (_phash() is not None and not rows["hashed"].all()):
        shards = _shards(manifest)
        read = _read_shards(shards, manifest.label_offset, directory, progress)
        rows = np.concatenate([read[shard.file] for shard in shards])
        _write(manifest, rows, directory)
    return rows


def _shards(manifest: Manifest) -> list[Shard]:
    return [shard for split in manifest.splits.values() for shard in split.shards]


def _key(manifest: Manifest) -> str:
    """Returns what tells whether the shards are still those that the file was written for."""
    return hashlib.sha256("".join(shard.sha256 for shard in _shards(manifest)).encode()).hexdigest()


def _write(manifest: Manifest, rows: np.ndarray, directory: Path) -> None:
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: rows[name] for name in _NAMES}
    np.savez_compressed(file, shards=np.array(_key(manifest)), **arrays)
    write_file(directory / FILE, file.getvalue())


def _load(manifest: Manifest, directory: Path) -> np.ndarray | None:
    try:
        with np.load(io.BytesIO((directory / FILE).read_bytes())) as arrays:
            if str(arrays["shards"]) != _key(manifest):
                return None
            rows = np.empty(len(arrays["label"]), ROW)
            for name in _NAMES:
                rows[name] = arrays[name]
            return rows
    # Missing, damaged or of another version: the shards have it all.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _read_shards(
    shards: Iterable[Shard], label_offset: int, directory: Path, progress: bool
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
                pool.map(lambda own: _read_shard(directory / own.file, label_offset), shards),
            ):
                found[shard.file] = rows
                bar.update(len(rows))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _read_shard(path: Path, label_offset: int) -> np.ndarray:
    rows = []
    for number, record in enumerate(records.read_records(path)):
        try:
            fields = decode_example(record)
            # A JPEG or PNG of theirs stays as it is, or becomes what a PNG was made from.
            data = fields[ENCODED][0]
            seen: list[Image.Image] = []
            image = normalize_encoding(data, "png", seen=seen.append)._replace(data=data)
            label = fields[LABEL][0] + label_offset
            rows.append(describe(image, seen[0], label, len(record)))
        except (BadImageError, KeyError, IndexError, ValueError) as error:
            raise UserError(f"{path}: record {number}: {error}") from error
    return np.array(rows, ROW)
