"""A data set on the disk in one of Hugging Face's layouts, read by their library ``datasets``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_fast.base.errors import UserError, first_line, how_to_install, nearest
from imagenet_fast.data.sources.base import Item, Source, printable
from imagenet_fast.data.sources.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    first_names,
    warnings_of_names,
)
from imagenet_fast.data.sources.holdout import hold_out

_SAVED = ("dataset_dict.json", "state.json")  # by `save_to_disk`
_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "fine_label")
# More than any data set has: such labels are numbers of something else.
_MOST_CLASSES = 1_000_000

_Rows = Any  # a datasets.Dataset; the library is not always there


class HuggingFaceSource(Source):
    """Rows with an image and a label."""

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        rows: Mapping[str, _Rows],
        numbers: Mapping[str, np.ndarray],
        chosen: Mapping[str, tuple[str, np.ndarray]],
        image_columns: Sequence[str],
        fingerprint: str,
        warnings: tuple[str, ...],
    ) -> None:
        """Initializes the source.

        Args:
          name: As ``Source``.
          labels: As ``Source``.
          rows: By their own split.
          numbers: Their labels, int64.
          chosen: For each split, from which of these its images are, and which rows.
          image_columns: The columns of the images; a row has its image in the first that has one.
          fingerprint: As ``Source``.
          warnings: As ``Source``.
        """
        sizes = {split: len(places) for split, (_, places) in chosen.items()}
        super().__init__("huggingface", name, labels, sizes, fingerprint, warnings=warnings)
        self._rows = dict(rows)
        self._numbers = dict(numbers)
        self._chosen = dict(chosen)
        self._image_columns = image_columns

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is the row's own, else its split and number."""
        origin, places = self._chosen[split]
        place = int(places[index])
        row = self._rows[origin][place]
        value: dict[str, Any] = next(
            (row[column] for column in self._image_columns if row[column]), {}
        )
        file, content = value.get("path"), value.get("bytes")
        if content is None and file:
            content = Path(file).read_bytes()
        name = printable(Path(file).name) if file else f"{origin}[{place}]"
        # Without an image it counts as one that cannot be decoded.
        return Item(content or b"", int(self._numbers[origin][place]), name)


def open_huggingface(
    path: Path,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    holdout: float = 0.1,
    seed: int = 0,
) -> HuggingFaceSource:
    """Returns a data set of images from a folder that Hugging Face's ``datasets`` can load.

    That is a folder of Parquet files, of class folders, or of images with a ``metadata.csv`` or
    ``metadata.jsonl``; of WebDataset's tars; or what ``save_to_disk`` wrote. Parquet files and tars
    are copied once into the library's cache, ``~/.cache/huggingface`` or ``$HF_HOME``, from which
    rows can be read in any order. Nothing is downloaded.

    Args:
      path: The folder. Splits are called ``train``, ``validation`` (or ``val``, ``valid``,
        ``dev``) and ``test``, as the library finds them by the files' names.
      name: The data set's name; by default the folder's.
      image_column: The column of the images; by default the only one of that type, else ``image``,
        ``img``, ``jpg``, ``jpeg``, ``png`` or ``webp``.
      label_column: That of the labels, which are class labels, whole numbers from 0 or text; by
        default the only column of class labels, else ``label``, ``labels``, ``cls``, ``class`` or
        ``fine_label``.
      holdout: The fraction of each class to hold out where no split is for validation.
      seed: Which images are held out.

    Raises:
      UserError: ``datasets`` is not installed or cannot load the folder, there is no split for
        training, a column is missing or of another type, or a row lacks its label.
    """
    datasets = _import_datasets()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    formats = [] if image_column else _tar_formats(path)
    rows = _load(datasets, path.resolve(), formats, label_column)
    features = rows["train"].features
    if len(formats) < 2:
        formats = [_column(path, features, datasets.Image, image_column, _IMAGE_COLUMNS, "image")]
    label_column = _column(
        path, features, datasets.ClassLabel, label_column, _LABEL_COLUMNS, "label"
    )
    for column in formats:
        rows = {split: _undecoded(datasets, path, own, column) for split, own in rows.items()}
    labels, numbers, warnings = _labels(datasets, path, rows, label_column)
    rows = {split: own for split, own in rows.items() if split in numbers}
    chosen = {split: (split, np.arange(len(own))) for split, own in numbers.items()}
    if "validation" not in rows:
        out = hold_out(numbers["train"], holdout, seed)
        chosen["train"] = "train", np.flatnonzero(~out)
        chosen["validation"] = "train", np.flatnonzero(out)
    digest = hashlib.sha256(_files_of(path).encode(errors="surrogateescape"))
    for split, (_, places) in sorted(chosen.items()):
        digest.update(split.encode() + places.astype(np.int64).tobytes())
    own_name, fingerprint = name or printable(path.resolve().name), digest.hexdigest()
    return HuggingFaceSource(
        own_name, labels, rows, numbers, chosen, formats, fingerprint, warnings
    )


def _import_datasets() -> Any:
    # The folder is here: nothing is to be asked for elsewhere.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--source=huggingface needs Hugging Face's datasets: {how_to_install('huggingface')} "
            f"({error})"
        ) from None
    return datasets


def _tar_formats(path: Path) -> list[str]:
    """Returns the names of the image columns of a folder of WebDataset's tars."""
    fields: set[str] = set()
    for file in path.rglob("*.tar"):
        with contextlib.suppress(tarfile.TarError, OSError), tarfile.open(file) as tar:
            fields.update(member.name.rpartition("/")[2].partition(".")[2] for member in tar)
    return [name for name in _IMAGE_COLUMNS if name in fields]


def _data_files(path: Path) -> dict[str, list[str]] | None:
    """Returns the files of each split of a folder of tables, or tars, with some pictures.

    By itself, the library reads the type of file that is most frequent.
    """
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    data = [file for file in files if file.suffix == ".parquet"]
    data = data or [file for file in files if file.suffix == ".tar"]
    readme = path / "README.md"
    if readme.is_file() and "configs:" in readme.read_text(errors="replace"):
        return None  # it names the files
    if not data or not any(file.name.lower().endswith(IMAGE_SUFFIXES) for file in files):
        return None
    splits: dict[str, list[str]] = {}
    for file in data:
        words = re.split("[^a-z]+", file.relative_to(path).as_posix().lower())
        split = next((SPLITS[word] for word in reversed(words) if word in SPLITS), "train")
        splits.setdefault(split, []).append(str(file))
    return splits


def _load(
    datasets: Any, path: Path, tar_formats: list[str], label_column: str | None
) -> dict[str, _Rows]:
    """Returns the rows of each split, by our name for it."""
    options: dict[str, Any] = {"data_files": _data_files(path)}
    if len(tar_formats) > 1:
        # By itself, the library expects all samples to have images of the same format.
        options["features"] = datasets.Features(
            {
                **{name: datasets.Image() for name in tar_formats},
                label_column or "cls": datasets.Value("string" if label_column else "int64"),
            }
        )
    try:
        if any((path / file).is_file() for file in _SAVED):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), **options)
    except Exception as error:  # whatever its readers raise
        raise UserError(
            f"{path}: Hugging Face's datasets cannot load it: {first_line(error)}"
        ) from error
    if isinstance(found, datasets.Dataset):
        found = {"train": found}
    rows: dict[str, _Rows] = {}
    for name, own in found.items():
        split = SPLITS.get(name.lower())
        if split is None or split in rows:
            names = ", ".join(map(repr, found))
            raise UserError(
                f"{path}: its splits are {names}, but must be train, validation (or val, valid, "
                "dev) and test, each once"
            )
        rows[split] = own
    if not rows.get("train"):
        raise UserError(f"{path}: has no split 'train' with rows in it")
    return rows


def _column(
    path: Path,
    features: Mapping[str, Any],
    kind: type,
    given: str | None,
    usual: tuple[str, ...],
    what: str,
) -> str:
    known = ", ".join(map(repr, features))
    if given is not None:
        if given not in features:
            raise UserError(
                f"{path}: has no column {given!r}{nearest(given, list(features))}; it has {known}"
            )
        return given
    typed = [name for name, own in features.items() if isinstance(own, kind)]
    found = typed if len(typed) == 1 else [name for name in usual if name in features]
    if not found:
        raise UserError(
            f"{path}: no column is the {what} by its name; it has {known}: say which with "
            f"--{what}_column"
        )
    return found[0]


def _undecoded(datasets: Any, path: Path, rows: _Rows, column: str) -> _Rows:
    """Returns rows whose images are files as they are, not pixels."""
    feature = rows.features.get(column)
    # What an image is in Parquet, where the file does not say that it is one.
    unnamed = (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )
    if not isinstance(feature, datasets.Image) and not unnamed:
        value = feature if feature is None else getattr(feature, "dtype", type(feature).__name__)
        if value not in ("binary", "string", "large_binary", "large_string"):
            raise UserError(
                f"{path}: column {column!r} holds {value}, but must hold images: files as bytes, "
                "or their paths"
            )
    try:
        return rows.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # whatever Arrow raises
        raise UserError(f"{path}: column {column!r} holds no images: {error}") from error


def _labels(
    datasets: Any, path: Path, rows: Mapping[str, _Rows], column: str
) -> tuple[tuple[str, ...], dict[str, np.ndarray], tuple[str, ...]]:
    """Returns the classes, each split's labels, and what to say of splits that have none."""
    feature = rows["train"].features[column]
    names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    values = {split: list(own[column][:]) for split, own in rows.items()}
    for split, own in rows.items():
        others = own.features[column]
        if names and isinstance(others, datasets.ClassLabel) and tuple(others.names) != names:
            values[split] = _renumbered(values[split], others.names, names)
    unlabelled = {
        split
        for split, own in values.items()
        if split != "train" and all(value in (None, -1) for value in own)
    }
    warnings = tuple(
        f"the split {split} is left out: it has no labels" for split in sorted(unlabelled)
    )
    values = {split: own for split, own in values.items() if split not in unlabelled}
    if names is None:
        names = _class_names(path, column, values["train"])
    warnings += warnings_of_names(names)
    as_text = isinstance(values["train"][0], str)
    number = {name if as_text else place: place for place, name in enumerate(names)}
    labels = {}
    for split, own in values.items():
        wrong = [place for place, value in enumerate(own) if value not in number]
        if wrong:
            raise UserError(
                f"{path}: row {wrong[0]} of {split} has the label {own[wrong[0]]!r}, which is none "
                f"of {len(names)} classes ({first_names([repr(name) for name in names])})"
            )
        labels[split] = np.array([number[value] for value in own], np.int64)
    return names, labels, warnings


def _renumbered(values: list[Any], names: list[str], known: tuple[str, ...]) -> list[Any]:
    """Returns labels by the training split's numbers; as text where it has no such class.

    What ``save_to_disk`` wrote can number the classes of each split in another way.
    """
    numbers = {name: number for number, name in enumerate(known)}
    own = {place: numbers.get(name, name) for place, name in enumerate(names)}
    return [own.get(value, value) for value in values]


def _class_names(path: Path, column: str, values: list[Any]) -> tuple[str, ...]:
    """Returns the classes that training has, where the column does not name them."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return tuple(sorted(set(values)))
    if kinds == {int} and max(values) >= _MOST_CLASSES:
        raise UserError(
            f"{path}: column {column!r} has the label {max(values)}, but numbers of classes must "
            f"be below {_MOST_CLASSES}: write them as text, or say which column is the labels' "
            "with --label_column"
        )
    if kinds == {int} and min(values) >= 0:
        return tuple(map(str, range(max(values) + 1)))
    raise UserError(
        f"{path}: column {column!r} must have class labels, text, or whole numbers from 0, and no "
        "row without one; say which column is the labels' with --label_column"
    )


def _files_of(path: Path) -> str:
    """Returns the names and sizes of all files, which differ where data sets do."""
    found = (own for own in sorted(path.rglob("*")) if own.is_file())
    return "".join(f"{own.relative_to(path)}\0{own.stat().st_size}\n" for own in found)
