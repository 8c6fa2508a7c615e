"""CIFAR-10 and CIFAR-100 as published: binary or Python, unpacked or as the archive itself."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.sources.arrays import ArraySource

_PIXELS = 3 * 32 * 32


@dataclasses.dataclass(frozen=True, eq=False)  # told apart, and hashed, by identity
class _Layout:
    """The names in one of the data sets' two formats.

    Attributes:
      splits: The files of each split.
      names: The file of class names.
      label_bytes: Of a binary record, the number of label bytes, of which the last is the class; 0
        for the pickled format.
      labels_key: In a pickled batch, the key of its labels.
      names_key: In the pickled file of class names, their key.
    """

    splits: Mapping[str, tuple[str, ...]]
    names: str
    label_bytes: int = 0
    labels_key: str = ""
    names_key: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return (*(part for parts in self.splits.values() for part in parts), self.names)


_LAYOUTS = {
    "cifar10": (
        _Layout(
            {
                "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
                "validation": ("test_batch.bin",),
            },
            "batches.meta.txt",
            1,
        ),
        _Layout(
            {
                "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
                "validation": ("test_batch",),
            },
            "batches.meta",
            labels_key="labels",
            names_key="label_names",
        ),
    ),
    "cifar100": (
        _Layout(
            {"train": ("train.bin",), "validation": ("test.bin",)},
            "fine_label_names.txt",
            2,  # the coarse label, then the fine one
        ),
        _Layout(
            {"train": ("train",), "validation": ("test",)},
            "meta",
            labels_key="fine_labels",
            names_key="fine_label_names",
        ),
    ),
}

# What Keras names the data sets in its cache, and what it appends: first those of folders, then
# those of archives; in each the newest version's first.
_KERAS_NAMES = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_KERAS_SUFFIXES = ("-target", "", "-target_archive", "_archive", ".tar.gz")


def open_cifar10(path: Path | None = None) -> ArraySource:
    """Returns CIFAR-10: 10 classes, 50,000 and 10,000 RGB images of 32x32 pixels.

    Args:
      path: The directory of its files (or the one above it), or the ``.tar.gz``, in either format;
        by default what ``keras.datasets.cifar10.load_data()`` has left in ``$KERAS_HOME`` or
        ``~/.keras``. Nothing is downloaded.

    Raises:
      UserError: A file is missing or is not what its name says, or Keras has left nothing.
    """
    return _open("cifar10", path or _find_in_keras_cache("cifar10"))


def open_cifar100(path: Path | None = None) -> ArraySource:
    """Returns CIFAR-100 with its 100 fine classes; else as ``open_cifar10``."""
    return _open("cifar100", path or _find_in_keras_cache("cifar100"))


def _find_in_keras_cache(name: str) -> Path:
    """Returns the folder or archive that one of Keras' versions has left."""
    # KERAS_HOME takes the place of ~/.keras in Keras 3; tf_keras and Keras 2 do not heed it.
    homes = dict.fromkeys((os.environ.get("KERAS_HOME") or "~/.keras", "~/.keras"))
    folders = []
    for home in homes:
        folders.append(to_local_path(home, "KERAS_HOME") / "datasets")
        for suffix in _KERAS_SUFFIXES:
            path = folders[-1] / f"{_KERAS_NAMES[name]}{suffix}"
            if path.exists():
                return path
    raise UserError(
        f"{name}: Keras has left none in {' or '.join(map(str, folders))}; "
        f'`python -c "import keras; keras.datasets.{name}.load_data()"` downloads it, or give '
        "--source_path"
    )


def _open(name: str, path: Path) -> ArraySource:
    files = _read_archive(path, name) if path.is_file() else _read_directory(path, name)
    layout = _layout(name, path, files)
    read = _read_binary if layout.label_bytes else _read_pickle
    arrays = {}
    for split, parts in layout.splits.items():
        batches = [read(path, part, files[part], layout) for part in parts]
        images = np.concatenate([images for images, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        # Channels first in the files.
        arrays[split] = (images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)
    return ArraySource(name, name, _class_names(path, files[layout.names], layout), arrays)


def _layout(name: str, path: Path, files: Mapping[str, bytes]) -> _Layout:
    """Returns the layout whose files are all there."""
    missing = {
        layout: [file for file in layout.files if file not in files] for layout in _LAYOUTS[name]
    }
    nearest = min(missing, key=lambda layout: len(missing[layout]))
    if missing[nearest]:
        raise UserError(
            f"{path}: is not {name}, or not all of it: no {', '.join(missing[nearest])}"
        )
    return nearest


def _wanted(name: str) -> set[str]:
    return {file for layout in _LAYOUTS[name] for file in layout.files}


def _read_directory(path: Path, name: str) -> dict[str, bytes]:
    if not path.is_dir():
        raise UserError(f"{path}: no such file or directory")
    folders = [path, *sorted(path.glob("cifar-*"))]
    wanted = _wanted(name)
    for folder in folders:
        files = {file: folder / file for file in wanted if (folder / file).is_file()}
        if files:
            return {file: source.read_bytes() for file, source in files.items()}
    return {}


def _read_archive(path: Path, name: str) -> dict[str, bytes]:
    wanted = _wanted(name)
    try:
        with tarfile.open(path) as archive:
            found = {}
            for member in archive:
                name, file = PurePosixPath(member.name).name, archive.extractfile(member)
                if file and name in wanted:
                    found[name] = file.read()
            return found
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as a tar archive: {error}") from error


def _read_binary(
    path: Path, part: str, data: bytes, layout: _Layout
) -> tuple[np.ndarray, np.ndarray]:
    size = layout.label_bytes + _PIXELS
    if not data or len(data) % size:
        raise UserError(f"{path}: {part} has {len(data)} bytes, not a multiple of {size}")
    table = np.frombuffer(data, np.uint8).reshape(-1, size)
    return table[:, layout.label_bytes :], table[:, layout.label_bytes - 1].astype(np.int64)


def _read_pickle(
    path: Path, part: str, data: bytes, layout: _Layout
) -> tuple[np.ndarray, np.ndarray]:
    batch = _unpickle(path, part, data)
    try:
        images = np.asarray(batch["data"], np.uint8).reshape(-1, _PIXELS)
        labels = np.asarray(batch[layout.labels_key], np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {part} is no batch of images: {error!r}") from error
    return images, labels


def _class_names(path: Path, data: bytes, layout: _Layout) -> tuple[str, ...]:
    if layout.label_bytes:
        return tuple(data.decode(errors="replace").split())
    try:
        names = _unpickle(path, layout.names, data)[layout.names_key]
    except KeyError as error:
        raise UserError(f"{path}: {layout.names} has no {layout.names_key}") from error
    return tuple(
        name.decode(errors="replace") if isinstance(name, bytes) else name for name in names
    )


class _ArrayUnpickler(pickle.Unpickler):
    """Loads dictionaries, lists and arrays, and refuses everything else: a pickle can run code."""

    _ALLOWED: ClassVar[Mapping[str, Any]] = {
        "_reconstruct": np.empty(0).__reduce__()[0],  # its module moved between NumPy 1 and 2
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            return self._ALLOWED[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def _unpickle(path: Path, part: str, data: bytes) -> dict[str, Any]:
    try:
        # Python 2 wrote these files: its strings are bytes here, the keys as well.
        values = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        return {key.decode() if isinstance(key, bytes) else key: v for key, v in values.items()}
    except Exception as error:  # a damaged pickle can raise almost anything
        raise UserError(f"{path}: {part} cannot be unpickled: {error}") from error
