"""Data sets of TensorFlow Datasets, prepared already or to be prepared by name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, first_line, how_to_install, nearest
from imagenet_fast.data import records
from imagenet_fast.data.examples import decode_example
from imagenet_fast.data.sources.base import Item, Source

_INFO = "dataset_info.json"
_FEATURES = "features.json"
_LABELS = "label.labels.txt"
_FILENAMES = ("file_name", "image/filename")
_VALIDATION = ("validation", "test")


class _Shard(NamedTuple):
    """A TFRecord file and the offsets of its records."""

    path: Path
    offsets: np.ndarray


class TfdsSource(Source):
    """Examples with the features ``image`` (an encoded image) and ``label``."""

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        shards: Mapping[str, list[_Shard]],
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Initializes the source.

        Args:
          name: As ``Source``.
          labels: As ``Source``.
          shards: The files of each split.
          warnings: As ``Source``.
        """
        digest = hashlib.sha256()
        for members in shards.values():
            for shard in members:
                digest.update(f"{shard.path.name}\0{shard.path.stat().st_size}\n".encode())
        self._shards = dict(shards)
        self._ends = {
            split: np.cumsum([len(shard.offsets) for shard in members])
            for split, members in shards.items()
        }
        sizes = {split: int(ends[-1]) for split, ends in self._ends.items()}
        super().__init__("tfds", name, labels, sizes, digest.hexdigest(), warnings=warnings)

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is the record's, if any, else the shard's name and index.

        Raises:
          UserError: The record is corrupt, or has no image or label.
        """
        ends = self._ends[split]
        number = int(np.searchsorted(ends, index, side="right"))
        path, offsets = self._shards[split][number]
        position = index - int(ends[number]) + len(offsets)
        record = records.read_record(path, position, int(offsets[position]))
        try:
            fields = decode_example(record)
            filename = next((fields[name][0] for name in _FILENAMES if name in fields), None)
            return Item(
                fields["image"][0],
                fields["label"][0],
                filename.decode() if filename else f"{path.name}[{position}]",
            )
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"{path}: record {position} is not an example with an image and a label: {error!r}"
            ) from error


def open_tfds(path: Path | None = None, tfds_name: str | None = None) -> TfdsSource:
    """Returns a data set of images that TensorFlow Datasets has prepared, or prepares now.

    The splits are ``train``, and ``validation`` or else, with a warning, ``test``.

    Args:
      path: The directory of ``dataset_info.json`` (``.../mnist/3.0.1``), or its parent, of whose
        versions the newest is used. With ``tfds_name``, the directory of all data sets; None:
        ``~/tensorflow_datasets`` or ``$TFDS_DATA_DIR``.
      tfds_name: The name in TensorFlow Datasets: ``cifar10``, ``cifar10:3.0.2`` or, with a
        configuration, ``imagenet_resized/64x64``. It is downloaded and prepared unless it has been;
        this needs the extra ``tfds``.

    Raises:
      UserError: There is no such name, it cannot be downloaded or prepared, the directory is not by
        TensorFlow Datasets, the files are not TFRecord or not complete, or the data set lacks a
        split or one of the features ``image`` and ``label``.
    """
    if tfds_name:
        directory = _prepared(tfds_name, path)
    elif path is None:
        raise UserError("the source 'tfds' needs source_path or tfds_name")
    else:
        directory = _version_directory(path)
    try:
        return _open_version(directory, _read_json(directory / _INFO))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{directory / _INFO}: is not as TensorFlow Datasets writes it: {error!r}"
        ) from error


def _prepared(name: str, data_dir: Path | None) -> Path:
    """Returns the directory of a prepared data set; prepares it if necessary."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            f"--tfds_name needs TensorFlow Datasets: {how_to_install('tfds')} ({error})"
        ) from None
    try:
        builder = tfds.builder(name, data_dir=None if data_dir is None else str(data_dir))
    except tfds.core.DatasetNotFoundError:
        plain = re.split("[/:]", name)[0]
        raise UserError(
            f"TensorFlow Datasets has no {plain!r}{nearest(plain, tfds.list_builders())}"
        ) from None
    except Exception as error:  # e.g. an unknown configuration or version
        raise UserError(f"tfds_name={name!r} cannot be used: {first_line(error)}") from error
    features = builder.info.features or {}
    for feature in ("image", "label"):
        if feature not in features:  # checked before the download
            raise UserError(
                f"{name}: has no feature {feature!r}; it has {', '.join(sorted(features))}"
            )
    try:
        builder.download_and_prepare(file_format="tfrecord")
    except Exception as error:  # by the network, the disk or the data set's code
        raise UserError(
            f"TensorFlow Datasets cannot prepare {name}: {first_line(error)}"
        ) from error
    return Path(builder.data_path)


def _open_version(directory: Path, info: Mapping[str, Any]) -> TfdsSource:
    if info.get("fileFormat", "tfrecord") != "tfrecord":
        raise UserError(
            f"{directory}: its files are {info['fileFormat']}; prepare it with "
            "file_format='tfrecord'"
        )
    splits = {split["name"]: split for split in info.get("splits", ())}
    validation = next((name for name in _VALIDATION if name in splits), None)
    if "train" not in splits or validation is None:
        raise UserError(
            f"{directory}: needs the splits train, and validation or test; has "
            f"{', '.join(sorted(splits)) or 'none'}; --source=folders can hold out validation "
            "images, from class folders"
        )
    shards = {
        "train": _index(directory, splits["train"]),
        "validation": _index(directory, splits[validation]),
    }
    warnings: tuple[str, ...] = ()
    classes = _class_names(directory)
    if validation == "test":
        warnings = ("there is no split 'validation': 'test' is used as validation",)
    elif "test" in splits:
        tested = {**shards, "test": _index(directory, splits["test"])}
        source = TfdsSource(info["name"], classes, tested, warnings)
        # E.g. the labels of ImageNet's test split are secret.
        if source.splits["test"] and source.read("test", 0).label >= 0:
            return source
        warnings = ("the split 'test' is ignored: it has no labels",)
    return TfdsSource(info["name"], classes, shards, warnings)


def _version_directory(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    if (path / _INFO).is_file():
        return path
    versions = [
        folder.parent
        for folder in path.glob(f"*/{_INFO}")
        if re.fullmatch(r"\d+\.\d+\.\d+", folder.parent.name)
    ]
    if not versions:
        raise UserError(f"{path}: is not by TensorFlow Datasets: it has no {_INFO}")
    return max(versions, key=lambda folder: [int(part) for part in folder.name.split(".")])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _class_names(directory: Path) -> tuple[str, ...]:
    features = _read_json(directory / _FEATURES).get("featuresDict", {}).get("features", {})
    for feature in ("image", "label"):
        if feature not in features:
            raise UserError(
                f"{directory}: has no feature {feature!r}; it has {', '.join(sorted(features))}"
            )
    _check_image(directory, features["image"])
    names = directory / _LABELS
    if names.is_file():
        return tuple(names.read_text(encoding="utf-8", errors="replace").splitlines())
    try:
        return tuple(map(str, range(int(features["label"]["classLabel"]["numClasses"]))))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{directory / _FEATURES}: its feature 'label' is not a class label"
        ) from error


def _check_image(directory: Path, feature: Mapping[str, Any]) -> None:
    """Refuses tensors, and floats stored in PNGs."""
    kind = "a tensor" if "tensor" in feature else feature.get("image", {}).get("dtype", "uint8")
    if kind not in ("uint8", "uint16"):
        raise UserError(
            f"{directory / _FEATURES}: its feature 'image' is {kind}, but must be an image of "
            "uint8 or uint16"
        )


def _index(directory: Path, split: Mapping[str, Any]) -> list[_Shard]:
    """Returns the files of a split, after comparing them with the counts in its info."""
    lengths = [int(length) for length in split["shardLengths"]]
    shards = []
    for number, expected in enumerate(lengths):
        pattern = f"*-{split['name']}.tfrecord-{number:05d}-of-{len(lengths):05d}"
        path = next(directory.glob(pattern), None)
        if path is None:
            raise UserError(f"{directory}: no file {pattern}")
        offsets = np.fromiter(records.locate_records(path), np.int64)
        if len(offsets) != expected:
            raise UserError(
                f"{path}: has {counted(len(offsets), 'record')}, but {expected} in {_INFO}"
            )
        shards.append(_Shard(path, offsets))
    return shards
