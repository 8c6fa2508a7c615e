"""Local data sets in Hugging Face's layouts, read by the library ``datasets``."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np

from imagenet_fast.base.errors import UserError, first_line, how_to_install, nearest
from imagenet_fast.data.examples import Label
from imagenet_fast.data.images import BadImageError
from imagenet_fast.data.prepare.sources.base import MAX_CLASSES, Item, Source, printable
from imagenet_fast.data.prepare.sources.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    check_size,
    classes_of_all,
    first_names,
    read_image,
    warnings_of_names,
    warnings_of_validation,
)
from imagenet_fast.data.prepare.sources.holdout import hold_out
from imagenet_fast.data.prepare.sources.huggingface_files import (
    SAVED,
    check_arrow_files,
    check_names,
)
from imagenet_fast.data.prepare.sources.inside import Inside
from imagenet_fast.data.prepare.sources.memory_limit import limited_memory
from imagenet_fast.data.prepare.sources.several import (
    SeveralLabels,
    check_no_flags,
    in_order,
    warnings_of_unused,
)
from imagenet_fast.data.prepare.sources.tars import BadTarError, open_tar

_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "fine_label")
# Of a tar of the library WebDataset: members, and bytes if it is compressed.
_MAX_MEMBERS = 10**8
_MAX_UNPACKED = 2**36
_SHOWN = 100  # characters of a label in a message
_MEMORY = 3 * 2**28  # bytes to load an empty folder

_Rows = Any  # datasets.Dataset, of an optional library
# The labels of a split: int64 of one each, or the classes of each row.
_Numbers = Union[np.ndarray, list[Label]]


class HuggingFaceSource(Source):
    """Rows with an image and a label.

    Args:
      name, labels, fingerprint, warnings: as ``Source``.
      rows: by original split.
      numbers: the rows' labels.
      chosen: for each split, the original split of its images and their indices.
      image_columns: the columns of the images; a row has its image in the first that has one.
      inside: where files that rows name must be; None: anywhere.
    """

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        rows: Mapping[str, _Rows],
        numbers: Mapping[str, _Numbers],
        chosen: Mapping[str, tuple[str, np.ndarray]],
        image_columns: Sequence[str],
        inside: Inside | None,
        fingerprint: str,
        warnings: Iterable[str],
    ) -> None:
        sizes = {split: len(places) for split, (_, places) in chosen.items()}
        super().__init__("huggingface", name, labels, sizes, fingerprint, warnings=warnings)
        self._rows = dict(rows)
        self._numbers = dict(numbers)
        self.multi_label = not isinstance(numbers["train"], np.ndarray)
        self._chosen = dict(chosen)
        self._image_columns = image_columns
        self._inside = inside

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is the row's, if any, else its split and index.

        Raises:
          UserError: the row names a file that it may not.
        """
        origin, places = self._chosen[split]
        place = int(places[index])
        try:
            row = self._rows[origin][place]
        except Exception as error:  # of any class
            raise UserError(
                f"{self.name}: row {place} of {origin} cannot be read: {_reason(error)}"
            ) from error
        value: dict[str, Any] = next(
            (row[column] for column in self._image_columns if row[column]), {}
        )
        file, content = value.get("path"), value.get("bytes")
        # A row without an image counts as an undecodable image.
        image: bytes | BadImageError = content or b""
        try:
            if content is None and file:
                image = self._read_file(Path(file), f"row {place} of {origin}")
            else:
                check_size(len(content or b""))
        except BadImageError as error:
            image = error
        name = printable(Path(file).name) if file else f"{origin}[{place}]"
        return Item(image, _label(self._numbers[origin], place), name)

    def _read_file(self, file: Path, row: str) -> bytes:
        if self._inside is not None and file not in self._inside:
            raise UserError(
                f"{self.name}: {row} names {printable(str(file))}, which is not in the data's "
                "folder; give --allow_outside if you know who made the data"
            )
        return read_image(file)


def open_huggingface(
    path: Path,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    allow_outside: bool = False,
    label_separator: str | None = None,
    label_columns: str | None = None,
    allow_unlabelled: bool = False,
) -> HuggingFaceSource:
    """Returns a data set of images from a folder that Hugging Face's ``datasets`` can load.

    That is a folder of Parquet files, of class folders, of images with a ``metadata.csv`` or
    ``metadata.jsonl``, of WebDataset tars, or the output of ``save_to_disk``. The library copies
    Parquet files and tars once into its cache, ``~/.cache/huggingface`` or ``$HF_HOME``, for random
    access. Nothing is downloaded.

    Args:
      path: the folder. The library recognizes the splits ``train``, ``validation`` (or ``val``,
        ``valid``, ``dev``) and ``test`` by the files' names.
      name: the data set's name; by default the folder's.
      image_column: column of the images; by default the only column of that type, else ``image``,
        ``img``, ``jpg``, ``jpeg``, ``png`` or ``webp``. Tars may mix the latter four.
      label_column: column of the labels, which are class labels, integers from 0 or text; by
        default the only column of class labels, else ``label``, ``labels``, ``cls``, ``class`` or
        ``fine_label``.
        A column of lists gives images several labels.
      holdout: the fraction of each class to hold out if there is no validation split.
      seed: of the choice of held-out images.
      allow_outside: whether rows and the data's card may name files outside of the folder, or links
        to such.
      label_separator: between the names of several labels in a column of text.
      label_columns: columns with 0 or 1, each a class, separated by commas; ``*``: all but those of
        the images.
      allow_unlabelled: whether an image may have none of several labels.

    Raises:
      UserError: ``datasets`` is not installed or cannot load the folder, there is no training
        split, a column is missing or has another type, a row lacks its label, or a file is named
        that is not in the folder.
    """
    several = SeveralLabels(label_separator, label_columns, allow_unlabelled, label_column)
    datasets = _import_datasets()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    path = path.resolve()
    check_names(path, allow_outside)
    formats = [] if image_column else _tar_formats(path)
    with limited_memory(_memory(path)):
        check_arrow_files(path)
        rows = _load(datasets, path, formats, label_column)
        features = rows["train"].features
        if len(formats) < 2:
            formats = [
                _column(path, features, datasets.Image, image_column, _IMAGE_COLUMNS, "image")
            ]
        if not label_columns:
            label_column = _column(
                path, features, datasets.ClassLabel, label_column, _LABEL_COLUMNS, "label"
            )
        for column in formats:
            rows = {
                split: _undecoded(datasets, path, split_rows, column)
                for split, split_rows in rows.items()
            }
        numbers: Mapping[str, _Numbers]
        if label_columns or label_separator or _is_list(features[str(label_column)]):
            if isinstance(features.get(label_column), datasets.ClassLabel):
                raise UserError(
                    f"{path}: column {label_column!r} has class labels, one for each image, but "
                    "label_separator is for text: leave it out"
                )
            flags = several.classes(path, list(features), formats)
            labels, numbers, warnings = _several(path, rows, label_column, flags, several)
        else:
            _check_text_stays_text(path, rows["train"], str(label_column))
            labels, numbers, warnings = _labels(datasets, path, rows, str(label_column))
            several.check_labelled(path, len(rows["train"]), (), multi_label=False)
    # Of a row that is read, the library decodes all columns, which may name any file or address.
    rows = {split: rows[split].select_columns(formats) for split in numbers}
    chosen = {split: (split, np.arange(len(labels))) for split, labels in numbers.items()}
    has_validation = "validation" in rows
    if not has_validation:
        out = hold_out(numbers["train"], holdout, seed)
        chosen["train"] = "train", np.flatnonzero(~out)
        chosen["validation"] = "train", np.flatnonzero(out)
    origin, places = chosen["validation"]
    measured = classes_of_all(_label(numbers[origin], place) for place in places.tolist())
    warnings += warnings_of_validation(labels, measured, path, None if has_validation else holdout)
    digest = hashlib.sha256(_files_of(path).encode(errors="surrogateescape"))
    for split, (_, places) in sorted(chosen.items()):
        digest.update(split.encode() + places.astype(np.int64).tobytes())
    own_name, fingerprint = name or printable(path.name), digest.hexdigest()
    inside = None if allow_outside else _inside(datasets, path)
    return HuggingFaceSource(
        own_name, labels, rows, numbers, chosen, formats, inside, fingerprint, warnings
    )


def _label(numbers: _Numbers, place: int) -> Label:
    label = numbers[place]
    return label if isinstance(label, tuple) else int(label)


def _import_datasets() -> Any:
    # The data is local: no requests are needed.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Arrow's other allocators reserve a gigabyte, which would not count for the limit on memory.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--source=huggingface needs Hugging Face's datasets: {how_to_install('huggingface')} "
            f"({error})"
        ) from None
    return datasets


def _inside(datasets: Any, path: Path) -> Inside:
    """Returns where rows of a data set in a folder may have their files."""
    unpacked = Path(datasets.config.EXTRACTED_DATASETS_PATH)  # of archives in the folder
    if path.parent.name == "snapshots":  # in the hub's cache, where files are links to ../../blobs
        return Inside(path, unpacked, path.parents[1] / "blobs")
    return Inside(path, unpacked)


def _memory(path: Path) -> int:
    """Returns how much more memory than now may be taken to load a folder, in bytes.

    The library reads whole parts of a file: a few times its size on the disk, if its images are
    compressed as images are. A small file can also hold one large image a million times.
    """
    sizes = [file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()]
    per_row = sum(sizes) // 4  # of labels
    return _MEMORY + 4 * max(sizes, default=0) + per_row + 10_000 * len(sizes)


def _reason(error: Exception) -> str:
    cause = f": {first_line(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
    return first_line(error) + cause


def _tar_formats(path: Path) -> list[str]:
    """Returns the names of the image columns of a folder of WebDataset's tars."""
    fields: set[str] = set()
    for file in path.rglob("*.tar"):
        # The library tells what is wrong with one.
        with (
            contextlib.suppress(BadTarError),
            open_tar(file, max_members=_MAX_MEMBERS, max_unpacked=_MAX_UNPACKED) as tar,
        ):
            for member in tar:
                name = member.name.rpartition("/")[2]
                field = name.partition(".")[2]
                if "." in field and field.rpartition(".")[2] in _IMAGE_COLUMNS:
                    raise UserError(
                        f"{file}: {printable(name)!r} has several dots, of which WebDataset takes "
                        "the first as the end of the sample's name: rename it, for example to "
                        f"{printable(name.rpartition('.')[0].replace('.', '_'))}."
                        f"{name.rpartition('.')[2]}, or give --image_column"
                    )
                fields.add(field)
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
    """Returns the rows of each split, by this package's name of the split."""
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
        if any((path / file).is_file() for file in SAVED):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), **options)
    except Exception as error:  # of any class
        raise UserError(
            f"{path}: Hugging Face's datasets cannot load it: {_reason(error)}"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        loaded = {"train": loaded}
    rows: dict[str, _Rows] = {}
    for name, split_rows in loaded.items():
        split = SPLITS.get(name.lower())
        if split is None or split in rows:
            names = ", ".join(map(repr, loaded))
            raise UserError(
                f"{path}: its splits are {names}, but must be train, validation (or val, valid, "
                "dev) and test, each once"
            )
        rows[split] = split_rows.with_format(None)
    if not rows.get("train"):
        raise UserError(f"{path}: has no split 'train', or one without rows")
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
    typed = [name for name, feature in features.items() if isinstance(feature, kind)]
    candidates = typed if len(typed) == 1 else [name for name in usual if name in features]
    if not candidates:
        raise UserError(
            f"{path}: has no {what} column with a usual name; it has {known}: give the right one "
            f"with --{what}_column"
        )
    return candidates[0]


def _undecoded(datasets: Any, path: Path, rows: _Rows, column: str) -> _Rows:
    """Returns the rows with images as encoded files instead of pixels."""
    feature = rows.features.get(column)
    # The structure of an image in Parquet files without the library's types.
    untyped = (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )
    if not isinstance(feature, datasets.Image) and not untyped:
        value = feature if feature is None else getattr(feature, "dtype", type(feature).__name__)
        if value not in ("binary", "string", "large_binary", "large_string"):
            raise UserError(
                f"{path}: column {column!r} has {value}, but must have images: files as bytes, or "
                "their paths"
            )
    try:
        return rows.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # of any class
        raise UserError(f"{path}: column {column!r} has no images: {_reason(error)}") from error


def _labels(
    datasets: Any, path: Path, rows: Mapping[str, _Rows], column: str
) -> tuple[tuple[str, ...], dict[str, np.ndarray], list[str]]:
    """Returns the classes, each split's labels, and warnings of splits without labels."""
    for split, split_rows in rows.items():
        if column not in split_rows.features:
            raise UserError(f"{path}: the split {split} has no column {column!r}")
    feature = rows["train"].features[column]
    numbered_by_data = isinstance(feature, datasets.ClassLabel)
    names = _checked_names(path, feature.names) if numbered_by_data else None
    try:
        values = {split: list(split_rows[column][:]) for split, split_rows in rows.items()}
    except Exception as error:  # of any class
        raise UserError(f"{path}: column {column!r} cannot be read: {_reason(error)}") from error
    for split, split_rows in rows.items():
        others = split_rows.features[column]
        if names and isinstance(others, datasets.ClassLabel) and tuple(others.names) != names:
            values[split] = _renumbered(values[split], others.names, names)
    unlabelled = {
        split
        for split, labels in values.items()
        if split != "train" and all(label in (None, -1) for label in labels)
    }
    warnings = [f"the split {split} is ignored: it has no labels" for split in sorted(unlabelled)]
    values = {split: values[split] for split in values if split not in unlabelled}
    if names is None:
        names = _class_names(path, column, values["train"])
    warnings += warnings_of_names(names)
    as_text = isinstance(values["train"][0], str)
    numbers = {name if as_text else number: number for number, name in enumerate(names)}
    numbered = {}
    for split, labels in values.items():
        wrong = next((row for row, own in enumerate(labels) if not _is_known(own, numbers)), None)
        if wrong is not None:
            raise UserError(
                f"{path}: row {wrong} of {split} has the label {repr(labels[wrong])[:_SHOWN]}, "
                f"which is not a class: {first_names([repr(name) for name in names])}"
            )
        numbered[split] = np.array([numbers[label] for label in labels], np.int64)
    return names, numbered, warnings


def _is_list(feature: Any) -> bool:
    """Returns whether a column has lists of texts, integers or class labels."""
    return isinstance(feature, list) or getattr(feature, "feature", None) is not None


def _class_names_of_list(feature: Any) -> list[str] | None:
    """Returns the names of the classes in lists of class labels; None: of others."""
    element = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return getattr(element, "names", None)


def _several(
    path: Path,
    rows: Mapping[str, _Rows],
    column: str | None,
    flags: list[str],
    several: SeveralLabels,
) -> tuple[tuple[str, ...], dict[str, list[Label]], list[str]]:
    """Returns the classes, each split's labels, and warnings, of rows with several labels.

    Args:
      path: the folder, for messages.
      rows: by split.
      column: of lists of names or numbers of classes, or of text.
      flags: columns with 0 or 1 instead; empty: there are none.
      several: says how labels are written.
    """
    named: dict[str, list[tuple[str, ...]]] = {}
    for split, split_rows in rows.items():
        columns = flags or [str(column)]
        lacking = [name for name in columns if name not in split_rows.features]
        if lacking:
            raise UserError(f"{path}: the split {split} has no column {lacking[0]!r}")
        names = _class_names_of_list(split_rows.features[columns[0]])
        checked = None if names is None else _checked_names(path, names)
        named[split] = []
        for row, values in enumerate(zip(*(split_rows[name][:] for name in columns))):
            place = f"{path}: row {row} of {split}"
            if flags:
                labels = several.flagged(place, flags, dict(zip(flags, values)))
            else:
                labels = several.names(f"{place}: {column}", _with_names(place, values[0], checked))
            named[split].append(labels)
    unlabelled = [split for split, own in named.items() if split != "train" and not any(own)]
    warnings = [f"the split {split} is ignored: it has no labels" for split in unlabelled]
    named = {split: own for split, own in named.items() if split not in unlabelled}
    without = [
        f"row {row} of {split}"
        for split, own in named.items()
        for row, labels in enumerate(own)
        if not labels
    ]
    several.check_labelled(path, sum(map(len, named.values())), without)
    if not flags:
        check_no_flags(path, named["train"])
    classes = tuple(
        flags
        or _class_names_of_list(rows["train"].features[column])
        or in_order({name for labels in named["train"] for name in labels})
    )
    numbers = {name: number for number, name in enumerate(classes)}
    numbered: dict[str, list[Label]] = {}
    for split, own in named.items():
        wrong = next((name for labels in own for name in labels if name not in numbers), None)
        if wrong is not None:
            raise UserError(
                f"{path}: {split} has the label {wrong!r:.{_SHOWN}}, which train lacks"
                f"{nearest(wrong, classes)}"
            )
        numbered[split] = [tuple(sorted({numbers[name] for name in labels})) for labels in own]
    if not any(numbered["train"]):
        raise UserError(f"{path}: no row of train has a label")
    trained = {name for labels in named["train"] for name in labels}
    warnings += (*warnings_of_names(classes), *warnings_of_unused(classes, trained))
    return classes, numbered, warnings


def _with_names(place: str, labels: Any, names: tuple[str, ...] | None) -> Any:
    """Returns the names of class numbers; without names, the labels themselves."""
    if names is None or not isinstance(labels, list):
        return labels
    wrong = [n for n in labels if not isinstance(n, int) or not 0 <= n < len(names)]
    if wrong:
        raise UserError(f"{place} has the label {wrong[0]!r}, which is not in 0..{len(names) - 1}")
    return [names[number] for number in labels]


def _check_text_stays_text(path: Path, rows: _Rows, column: str) -> None:
    """Checks that no CSV file has labels such as ``01``, which the library reads as 1.

    Raises:
      UserError: one has.
    """
    if not str(rows.features[column].dtype).startswith("int"):
        return
    for file in sorted(path.rglob("*.csv")):
        # The library has read the file: of what only this reader refuses, nothing is known.
        with (
            contextlib.suppress(csv.Error, UnicodeDecodeError),
            file.open(encoding="utf-8-sig", newline="") as lines,
        ):
            for row in csv.DictReader(lines):
                text = (row.get(column) or "").strip()
                if text[:1] == "0" != text and text.isdecimal():
                    raise UserError(
                        f"{file}: the label {text[:_SHOWN]!r} would be read as a number, without "
                        "its zeros: read the file by --source=list, or write other labels"
                    )


def _is_known(label: Any, numbers: Mapping[Any, int]) -> bool:
    # Others cannot be looked up, such as lists.
    return isinstance(label, (int, float, str)) and label in numbers


def _checked_names(path: Path, names: Any) -> tuple[str, ...]:
    """Returns the classes that the data set's description names."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: the names of its classes are not text")
    if not 0 < len(names) <= MAX_CLASSES:
        raise UserError(f"{path}: has {len(names):,} classes, not 1..{MAX_CLASSES:,}")
    return tuple(map(printable, names))


def _renumbered(values: list[Any], names: list[str], known: tuple[str, ...]) -> list[Any]:
    """Returns labels as numbered in the training split, or the names of unknown classes.

    ``save_to_disk`` can number the classes of each split differently.
    """
    numbers = {name: number for number, name in enumerate(known)}
    renumbered = {place: numbers.get(name, name) for place, name in enumerate(names)}
    return [renumbered.get(value, value) for value in values]


def _class_names(path: Path, column: str, values: list[Any]) -> tuple[str, ...]:
    """Returns the classes of the training split if the column does not name them."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return tuple(sorted(set(values)))
    if kinds == {int} and max(values) >= MAX_CLASSES:
        raise UserError(
            f"{path}: column {column!r} has the label {max(values)}, but class indices must be "
            f"below {MAX_CLASSES}: write labels as text, or give their column with --label_column"
        )
    if kinds == {int} and min(values) >= 0:
        return tuple(map(str, range(max(values) + 1)))
    if type(None) in kinds:
        raise UserError(
            f"{path}: row {values.index(None)} of train has no {column!r}, or one that was read as "
            "missing, such as NA or null: give each row a label, or another name than NA"
        )
    raise UserError(
        f"{path}: column {column!r} must have class labels, text, or integers from 0 in each row; "
        "give the column of the labels with --label_column"
    )


def _files_of(path: Path) -> str:
    """Returns the names and sizes of all files, which identify the data set."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return "".join(f"{file.relative_to(path)}\0{file.stat().st_size}\n" for file in files)
