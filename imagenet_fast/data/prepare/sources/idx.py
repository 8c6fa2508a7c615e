"""MNIST and Fashion-MNIST in idx files, as published."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.data.prepare.sources.arrays import ArraySource, pad_images
from imagenet_fast.data.prepare.sources.files import size_of

# Of Debian's package dataset-fashion-mnist.
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")

_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_LABELS = {"fashion_mnist": _FASHION, "mnist": tuple("0123456789")}

# Both data sets use the same file names, but differ in the first training labels.
_FIRST_LABELS = {
    "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5],
    "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4],
}
_SPLITS = {"train": "train", "validation": "t10k"}
_UNSIGNED_BYTE = 8
# Of a file; MNIST's largest has 60,000 images in 47 MB.
_MAX_IMAGES = 2**18
_MAX_BYTES = 2**28


def open_idx(path: Path | None = None, name: str | None = None, pad_to: int = 0) -> ArraySource:
    """Returns MNIST or Fashion-MNIST from a directory of idx files, gzipped or not.

    Args:
      path: the directory of ``train-images-idx3-ubyte`` and the other three files; by default that
        of Debian's package dataset-fashion-mnist.
      name: ``mnist`` or ``fashion_mnist``; by default recognized by the first training labels.
      pad_to: height and width to which images of 28 x 28 pixels are padded with zeros; 0: none.

    Raises:
      UserError: a file is missing or has wrong content, the data set is not recognized, or the
        images are larger than ``pad_to``.
    """
    path = path or _DEBIAN
    if not path.is_dir():
        advice = "; install Debian's dataset-fashion-mnist or give --source_path"
        raise UserError(f"{path}: no such directory{advice * (path == _DEBIAN)}")
    arrays = {
        split: (_read(path, f"{prefix}-images", 3), _read(path, f"{prefix}-labels", 1))
        for split, prefix in _SPLITS.items()
    }
    if name is None:
        first = arrays["train"][1][:10].tolist()
        name = next((known for known, labels in _FIRST_LABELS.items() if labels == first), None)
        if name is None:
            raise UserError(
                f"{path}: the labels are neither MNIST's nor Fashion-MNIST's; prepare other images "
                "from class folders, with --source=folders, or in Python give the name of one of "
                "the two: open_source('idx', path, name='mnist')"
            )
    if name not in _LABELS:
        raise UserError(
            f"no idx data set {name!r}; choose from {', '.join(_LABELS)}{nearest(name, _LABELS)}"
        )
    if pad_to:
        arrays = {
            split: (pad_images(images, pad_to), numbers)
            for split, (images, numbers) in arrays.items()
        }
    source = ArraySource("idx", name, _LABELS[name], arrays)
    source.pad_to = pad_to
    return source


def _read(directory: Path, stem: str, rank: int) -> np.ndarray:
    """Returns the uint8 array in ``STEM-idxRANK-ubyte``, with or without ``.gz``."""
    path = directory / f"{stem}-idx{rank}-ubyte"
    zipped = path.with_name(f"{path.name}.gz")
    if not path.exists():
        if not zipped.exists():
            raise UserError(f"{path}: no such file, nor {zipped.name}")
        path = zipped
    size_of(path)  # a pipe would block
    try:
        with gzip.open(path) if path == zipped else path.open("rb") as file:
            header = file.read(4 * (1 + rank))
            shape = _shape(path, header, rank)
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if len(data) != math.prod(shape):
        found = f"at least {len(data)}" if len(data) > math.prod(shape) else str(len(data))
        raise UserError(f"{path}: has {found} bytes of data, but {math.prod(shape)} in its header")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(path: Path, header: bytes, rank: int) -> tuple[int, ...]:
    """Returns the shape in the header of a file, whose size is not larger than it may be."""
    if len(header) < 4 * (1 + rank) or header[:4] != bytes((0, 0, _UNSIGNED_BYTE, rank)):
        raise UserError(
            f"{path}: is not an idx file of unsigned bytes in {rank} dimensions: it starts with "
            f"{header[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{rank}I", header[4:])
    if not math.prod(shape):
        raise UserError(f"{path}: is empty: its header has the shape {shape}")
    if shape[0] > _MAX_IMAGES or math.prod(shape) > _MAX_BYTES:
        raise UserError(
            f"{path}: has {counted(shape[0], 'item')} and {math.prod(shape):,} bytes in its "
            f"header, but may have {_MAX_IMAGES:,} items and {_MAX_BYTES:,} bytes"
        )
    return shape
