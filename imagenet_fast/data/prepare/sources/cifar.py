"""CIFAR-10 and CIFAR-100 in their binary and Python versions, unpacked or as archives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.data.prepare.sources.base import printable
from imagenet_fast.data.prepare.sources.numeric_pickle import read_numeric_pickle
from imagenet_fast.data.prepare.sources.tars import BadTarError, open_tar

_PIXELS = 3 * 32 * 32
# In bytes: of a file of images, of one of class names, and of all files in both versions together.
# The largest pickle of CIFAR-100 has 155 MB, all of CIFAR-10 twice 186 MB.
_MAX_BATCH = 160 * 2**20
_MAX_NAMES = 2**20
_MAX_FILES = 400 * 2**20
# Of an archive, which has 8 members and 186 MB.
_MAX_MEMBERS = 1000
_MAX_UNPACKED = 2**30
_MAX_LABEL = 999


@dataclasses.dataclass(frozen=True)
class _Dataset:
    """The file names, and record formats, of a data set in both versions."""

    splits: Mapping[str, tuple[str, ...]]  # files; in the binary version, ``.bin`` is appended
    keras_name: str  # in Keras' cache
    label_bytes: int  # of a binary record; the last is the class
    binary_names: str  # the file of class names, text
    labels_key: str  # in a pickled batch
    pickled_names: str  # the pickled file of class names
    names_key: str  # in it

    def missing(self, files: Mapping[str, bytes], suffix: str) -> list[str]:
        """Returns the files that the version with a suffix, ``.bin`` or none, lacks."""
        names = self.binary_names if suffix else self.pickled_names
        batches = [f"{part}{suffix}" for parts in self.splits.values() for part in parts]
        return [file for file in (*batches, names) if file not in files]


_DATASETS = {
    "cifar10": _Dataset(
        {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "validation": ("test_batch",)},
        "cifar-10-batches-py",
        label_bytes=1,
        binary_names="batches.meta.txt",
        labels_key="labels",
        pickled_names="batches.meta",
        names_key="label_names",
    ),
    "cifar100": _Dataset(
        {"train": ("train",), "validation": ("test",)},
        "cifar-100-python",
        label_bytes=2,  # the coarse label, then the fine one
        binary_names="fine_label_names.txt",
        labels_key="fine_labels",
        pickled_names="meta",
        names_key="fine_label_names",
    ),
}
# Suffixes in Keras' cache: of folders, then of archives; newer versions of Keras first.
_KERAS_SUFFIXES = ("-target", "", "-target_archive", "_archive", ".tar.gz")


def open_cifar10(path: Path | None = None) -> ArraySource:
    """Returns CIFAR-10: 10 classes, 50,000 and 10,000 RGB images of 32x32 pixels.

    Args:
      path: the directory of its files (or its parent), or the ``.tar.gz``, in either version; by
        default what ``keras.datasets.cifar10.load_data()`` stored in ``$KERAS_HOME`` or
        ``~/.keras``. Nothing is downloaded.

    Raises:
      UserError: a file is missing or has wrong content, or Keras' cache does not have the data set.
    """
    return _open("cifar10", path or _find_in_keras_cache("cifar10"))


def open_cifar100(path: Path | None = None) -> ArraySource:
    """Returns CIFAR-100 with its 100 fine classes; otherwise like ``open_cifar10``."""
    return _open("cifar100", path or _find_in_keras_cache("cifar100"))


def _find_in_keras_cache(name: str) -> Path:
    """Returns the folder or archive that a version of Keras stored."""
    # Keras 3 uses KERAS_HOME; Keras 2 always uses ~/.keras.
    homes = dict.fromkeys((os.environ.get("KERAS_HOME") or "~/.keras", "~/.keras"))
    folders = [to_local_path(home, "KERAS_HOME") / "datasets" for home in homes]
    for folder in folders:
        for suffix in _KERAS_SUFFIXES:
            path = folder / f"{_DATASETS[name].keras_name}{suffix}"
            if path.exists():
                return path
    raise UserError(
        f"{name}: not in Keras' cache, {' or '.join(map(str, folders))}; give --source_path, or "
        f'download it with `python -c "import keras; keras.datasets.{name}.load_data()"`'
    )


def _open(name: str, path: Path) -> ArraySource:
    dataset = _DATASETS[name]
    limits = {
        **dict.fromkeys((*dataset.missing({}, ""), *dataset.missing({}, ".bin")), _MAX_BATCH),
        **dict.fromkeys((dataset.binary_names, dataset.pickled_names), _MAX_NAMES),
    }
    files = _read_directory(path, limits) if path.is_dir() else _read_archive(path, limits)
    missing, suffix = min(
        ((dataset.missing(files, suffix), suffix) for suffix in (".bin", "")),
        key=lambda version: len(version[0]),
    )
    if missing:
        raise UserError(f"{path}: is not a complete {name}: it lacks {', '.join(missing)}")
    read = _read_binary if suffix else _read_pickle
    arrays = {}
    for split, parts in dataset.splits.items():
        batches = [read(path, part + suffix, files[part + suffix], dataset) for part in parts]
        images = np.concatenate([images for images, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        # The files have channels first.
        arrays[split] = (images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)
    if suffix:
        class_names = tuple(files[dataset.binary_names].decode(errors="replace").split())
    else:
        class_names = _unpickle_class_names(path, files[dataset.pickled_names], dataset)
    return ArraySource(name, name, class_names, arrays)


def _read_directory(path: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    """Returns the files that are there, each of no more bytes than its limit."""
    for folder in (path, *sorted(path.glob("cifar-*"))):
        there = [file for file in limits if (folder / file).is_file()]
        if there:
            files: dict[str, bytes] = {}
            for file in there:
                try:
                    files[file] = read_bounded(folder / file, min(limits[file], _left(files)))
                except OSError as error:
                    raise UserError(f"{folder / file}: cannot be read: {error.strerror}") from error
            return files
    return {}


def _read_archive(path: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    files: dict[str, bytes] = {}
    try:
        with open_tar(path, max_members=_MAX_MEMBERS, max_unpacked=_MAX_UNPACKED) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in limits:
                    files[name] = archive.read(member, min(limits[name], _left(files)))
    except BadTarError as error:
        raise UserError(f"{path}: cannot be read as a tar archive: {error}") from error
    return files


def _left(files: Mapping[str, bytes]) -> int:
    """Returns how many bytes may be read besides some files."""
    return _MAX_FILES - sum(map(len, files.values()))


def _read_binary(
    path: Path, part: str, data: bytes, dataset: _Dataset
) -> tuple[np.ndarray, np.ndarray]:
    size = dataset.label_bytes + _PIXELS
    if not data or len(data) % size:
        raise UserError(f"{path}: {part} has {len(data)} bytes, not a multiple of {size}")
    table = np.frombuffer(data, np.uint8).reshape(-1, size)
    return table[:, dataset.label_bytes :], table[:, dataset.label_bytes - 1].astype(np.int64)


def _read_pickle(
    path: Path, part: str, data: bytes, dataset: _Dataset
) -> tuple[np.ndarray, np.ndarray]:
    batch = _unpickle(path, part, data)
    try:
        images = _integers(batch["data"], 255).astype(np.uint8).reshape(-1, _PIXELS)
        labels = _integers(batch[dataset.labels_key], _MAX_LABEL).astype(np.int64)
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: {part} is not a batch of images: {error!r}") from error
    if labels.ndim != 1 or len(labels) != len(images) or not len(images):
        raise UserError(
            f"{path}: {part} has {counted(len(images), 'image')}, but labels of shape "
            f"{labels.shape}"
        )
    return images, labels


def _integers(values: Any, highest: int) -> np.ndarray:
    """Returns an array or a list of integers as an array.

    Raises:
      ValueError: it is something else, or has a number that is negative or above ``highest``.
    """
    if isinstance(values, list) and all(type(v) is int and 0 <= v <= highest for v in values):
        values = np.array(values, np.int64)
    if not isinstance(values, np.ndarray) or (
        values.size and not 0 <= values.min() <= values.max() <= highest
    ):
        raise ValueError(f"not an array or a list of integers in 0..{highest}")
    return values


def _unpickle_class_names(path: Path, data: bytes, dataset: _Dataset) -> tuple[str, ...]:
    names = _unpickle(path, dataset.pickled_names, data).get(dataset.names_key)
    if (
        not isinstance(names, (list, tuple))
        or not names
        or not all(isinstance(name, (bytes, str)) for name in names)
    ):
        raise UserError(
            f"{path}: {dataset.pickled_names} has no {dataset.names_key} that are a list of text"
        )
    return tuple(
        name.decode(errors="replace") if isinstance(name, bytes) else printable(name)
        for name in names
    )


def _unpickle(path: Path, part: str, data: bytes) -> dict[str, Any]:
    try:
        return read_numeric_pickle(data)
    except ValueError as error:
        raise UserError(f"{path}: {part} cannot be unpickled: {error}") from error
