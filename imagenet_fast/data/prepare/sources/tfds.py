"""Data sets of TensorFlow Datasets, prepared already or to be prepared by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union

import msgspec
import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, first_line, how_to_install, nearest
from imagenet_fast.base.outside import read_bounded, read_json
from imagenet_fast.data import records
from imagenet_fast.data.examples import classes_of, decode_example
from imagenet_fast.data.prepare.sources.base import MAX_CLASSES, Item, Source, printable

_INFO = "dataset_info.json"
_FEATURES = "features.json"
_LABELS = "label.labels.txt"
_FILENAMES = ("file_name", "image/filename")
_VALIDATION = ("validation", "test")
_MAX_LABELS = 2**24  # bytes of the file of class names

# JSON of protocol buffers has 64-bit integers as text.
_Count = Union[
    Annotated[str, msgspec.Meta(pattern=r"^\d{1,15}\Z")], Annotated[int, msgspec.Meta(ge=0)]
]
_Json = TypeVar("_Json")


class _Split(msgspec.Struct, rename="camel"):
    name: str
    shard_lengths: list[_Count]


class _Info(msgspec.Struct, rename="camel"):
    """The content of ``dataset_info.json``."""

    name: str
    file_format: str = "tfrecord"
    splits: list[_Split] = []


class _ClassLabel(msgspec.Struct, rename="camel"):
    num_classes: _Count = 0


class _Image(msgspec.Struct):
    dtype: str = "uint8"


class _Feature(msgspec.Struct, rename="camel"):
    class_label: _ClassLabel = msgspec.field(default_factory=_ClassLabel)
    image: _Image = msgspec.field(default_factory=_Image)
    tensor: dict[str, Any] = {}


class _FeaturesDict(msgspec.Struct):
    features: dict[str, _Feature] = {}


class _Features(msgspec.Struct, rename="camel"):
    """The content of ``features.json``."""

    features_dict: _FeaturesDict = msgspec.field(default_factory=_FeaturesDict)


class _Shard(NamedTuple):
    """A TFRecord file and the offsets of its records."""

    path: Path
    offsets: np.ndarray


class TfdsSource(Source):
    """Examples with the features ``image`` (an encoded image) and ``label``.

    Args:
      name, labels, warnings: as ``Source``.
      shards: the files of each split.
    """

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        shards: Mapping[str, list[_Shard]],
        warnings: Iterable[str] = (),
    ) -> None:
        digest = hashlib.sha256()
        for members in shards.values():
            for shard in members:
                name_and_size = f"{shard.path.name}\0{shard.path.stat().st_size}\n"
                digest.update(name_and_size.encode(errors="surrogateescape"))
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
          UserError: the record is corrupt, or has no image or label.
        """
        ends = self._ends[split]
        number = int(np.searchsorted(ends, index, side="right"))
        path, offsets = self._shards[split][number]
        position = index - int(ends[number]) + len(offsets)
        record = records.read_record(path, position, int(offsets[position]))
        try:
            return _item(decode_example(record), f"{printable(path.name)}[{position}]")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"{path}: record {position} is not an example with an image and a label: {error!r}"
            ) from error


def _item(fields: Mapping[str, list[Any]], name: str) -> Item:
    """Returns an example's image, with a name if it has none of its own."""
    image, label = fields["image"][0], fields["label"][0]
    filename = next((fields[field][0] for field in _FILENAMES if fields.get(field)), None)
    if not isinstance(image, bytes) or not isinstance(label, int):
        raise ValueError(f"they are of the types {type(image).__name__}, {type(label).__name__}")
    if isinstance(filename, bytes) and filename:
        name = filename.decode(errors="replace")
    return Item(image, label, name)


def open_tfds(path: Path | None = None, tfds_name: str | None = None) -> TfdsSource:
    """Returns a data set of images that TensorFlow Datasets has prepared, or prepares now.

    The splits are ``train``, and ``validation`` or else, with a warning, ``test``.

    Args:
      path: the directory of ``dataset_info.json`` (``.../mnist/3.0.1``), or its parent, of whose
        versions the newest is used. With ``tfds_name``, the directory of all data sets; None:
        ``~/tensorflow_datasets`` or ``$TFDS_DATA_DIR``.
      tfds_name: the name in TensorFlow Datasets: ``cifar10``, ``cifar10:3.0.2`` or, with a
        configuration, ``imagenet_resized/64x64``. It is downloaded and prepared unless it has been;
        this needs the extra ``tfds``.

    Raises:
      UserError: there is no such name, it cannot be downloaded or prepared, the directory is not by
        TensorFlow Datasets, the files are not TFRecord or not complete, or the data set lacks a
        split or one of the features ``image`` and ``label``.
    """
    if tfds_name:
        directory = _prepared(tfds_name, path)
    elif path is None:
        raise UserError("the source 'tfds' needs source_path or tfds_name")
    else:
        directory = _version_directory(path)
    return _open_version(directory, _read(directory / _INFO, _Info))


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
    _check_features(name, builder.info.features or {})  # before the download
    try:
        builder.download_and_prepare(file_format="tfrecord")
    except Exception as error:  # by the network, the disk or the data set's code
        raise UserError(
            f"TensorFlow Datasets cannot prepare {name}: {first_line(error)}"
        ) from error
    return Path(builder.data_path)


def _open_version(directory: Path, info: _Info) -> TfdsSource:
    if info.file_format != "tfrecord":
        raise UserError(
            f"{directory}: its files are {info.file_format}; prepare it with file_format='tfrecord'"
        )
    splits = {split.name: split for split in info.splits}
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
        source = TfdsSource(printable(info.name), classes, tested, warnings)
        # E.g. the labels of ImageNet's test split are secret.
        if source.splits["test"] and min(classes_of(source.read("test", 0).label)) >= 0:
            return source
        warnings = ("the split 'test' is ignored: it has no labels",)
    return TfdsSource(printable(info.name), classes, shards, warnings)


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


def _read(path: Path, kind: type[_Json]) -> _Json:
    try:
        return read_json(path, kind)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not as TensorFlow Datasets writes it: {error}") from error


def _class_names(directory: Path) -> tuple[str, ...]:
    features = _read(directory / _FEATURES, _Features).features_dict.features
    _check_features(directory, features)
    _check_image(directory, features["image"])
    path = directory / _LABELS
    if path.is_file():
        try:
            names = read_bounded(path, _MAX_LABELS).decode(errors="replace").splitlines()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        count = len(names)
    else:
        path = directory / _FEATURES
        count = int(features["label"].class_label.num_classes)
        if not count:
            raise UserError(f"{path}: its feature 'label' is not a class label")
        names = list(map(str, range(min(count, MAX_CLASSES))))
    if not 0 < count <= MAX_CLASSES:
        raise UserError(f"{path}: has {counted(count, 'class', 'classes')}, not 1..{MAX_CLASSES}")
    return tuple(names)


def _check_features(place: Any, features: Mapping[str, Any]) -> None:
    for feature in ("image", "label"):
        if feature not in features:
            raise UserError(
                f"{place}: has no feature {feature!r}; it has {', '.join(sorted(features))}"
            )


def _check_image(directory: Path, feature: _Feature) -> None:
    """Refuses tensors, and floats stored in PNGs."""
    kind = "a tensor" if feature.tensor else feature.image.dtype
    if kind not in ("uint8", "uint16"):
        raise UserError(
            f"{directory / _FEATURES}: its feature 'image' is {kind}, but must be an image of "
            "uint8 or uint16"
        )


def _index(directory: Path, split: _Split) -> list[_Shard]:
    """Returns the files of a split, after comparing them with the counts in its info."""
    if not split.shard_lengths:
        raise UserError(f"{directory / _INFO}: its split {split.name!r} has no files")
    shards = []
    for number, expected in enumerate(map(int, split.shard_lengths)):
        pattern = f"*-{split.name}.tfrecord-{number:05d}-of-{len(split.shard_lengths):05d}"
        path = next(directory.glob(pattern), None)
        if path is None or not path.is_file():
            raise UserError(f"{directory}: no file {pattern}")
        offsets = np.fromiter(records.locate_records(path), np.int64)
        if len(offsets) != expected:
            raise UserError(
                f"{path}: has {counted(len(offsets), 'record')}, but {expected} in {_INFO}"
            )
        shards.append(_Shard(path, offsets))
    return shards
