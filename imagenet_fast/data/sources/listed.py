"""A list of image files and their labels: CSV, TSV or JSON Lines."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.sources.base import ListedFile, printable
from imagenet_fast.data.sources.files import (
    SPLITS,
    FileSource,
    file_source,
    first_names,
    size_of,
    warnings_of_names,
)

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
# Python reads none of more than some thousand digits.
_WHOLE_NUMBER = re.compile(r"-?\d{1,100}")
# Names of columns, of which the first that is there is taken.
_IMAGE_COLUMNS = ("image", "file_name", "filename", "file", "path", "image_path", "filepath")
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "class_name")
_SPLIT_COLUMNS = ("split", "set", "subset")


class _Row(NamedTuple):
    """A line of the list.

    Attributes:
      number: From 1.
      file: The image's, as written.
      label: The class' name.
      split: ``train``, ``validation`` or ``test``.
    """

    number: int
    file: str
    label: str
    split: str


def open_list(
    path: Path,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    image_dir: str | None = None,
    holdout: float = 0.1,
    seed: int = 0,
) -> FileSource:
    """Returns the images that a CSV, TSV or JSON Lines file names, with its labels.

    The first line of a CSV or TSV file names its columns. Labels are text; the classes are numbered
    in alphabetical order or, if all are whole numbers, by these. Files that are in several classes,
    classes without validation images and classes whose names differ in case alone are warned of.

    Args:
      path: The list, ``.csv``, ``.tsv``, ``.jsonl`` or ``.ndjson``, in UTF-8.
      name: The data set's name; by default the list's.
      image_column: The column of the files' paths; by default ``image``, ``file_name``,
        ``filename``, ``file``, ``path``, ``image_path`` or ``filepath``.
      label_column: That of the labels; by default ``label``, ``class``, ``category``, ``target``,
        ``labels`` or ``class_name``.
      split_column: That of the splits, ``train``, ``validation`` (or ``val``, ``valid``, ``dev``)
        and ``test``; by default ``split``, ``set`` or ``subset``, if there is one.
      image_dir: Where relative paths begin; by default the list's folder.
      holdout: The fraction of each class to hold out where no image is for validation.
      seed: Which images are held out.

    Raises:
      UserError: The list cannot be read, lacks a column, a label or images for training, names a
        file that is not there or twice with different labels or splits, or has a class in another
        split that training has not.
    """
    path = path.resolve()
    rows = _read(path, image_column, label_column, split_column)
    root = to_local_path(image_dir, "image_dir").resolve() if image_dir else path.parent
    rows = _without_repeats(path, root, rows)
    labels = _classes(path, rows)
    numbers = {label: number for number, label in enumerate(labels)}
    files: dict[str, list[ListedFile]] = {"train": []}
    for row, size in zip(rows, _sizes(path, root, rows)):
        image = ListedFile(row.file, numbers[row.label], size)
        files.setdefault(row.split, []).append(image)
    files = {split: sorted(images) for split, images in files.items()}
    return file_source(
        "list",
        name or printable(path.stem),
        root,
        labels,
        files,
        warnings_of_names(labels),
        holdout=holdout,
        seed=seed,
        place=path,
    )


def _read(
    path: Path, image_column: str | None, label_column: str | None, split_column: str | None
) -> list[_Row]:
    """Returns the lines of a list."""
    rows = []
    columns: tuple[str, str, str | None] | None = None
    for number, values in _lines(path):
        if columns is None:
            known = list(values)
            columns = (
                _column(path, known, image_column, _IMAGE_COLUMNS, "image"),
                _column(path, known, label_column, _LABEL_COLUMNS, "label"),
                _split_column(path, known, split_column),
            )
            if columns[0] in columns[1:]:
                raise UserError(
                    f"{path}: the column {columns[0]!r} cannot be both that of the images and "
                    "another one"
                )
        if columns[2] is None and (late := _split_column(path, list(values), None)):
            raise UserError(
                f"{path}, line {number}: has {late!r}, which the first line has not: say of each "
                "image which split it is for"
            )
        image, label, split = (None if own is None else values.get(own) for own in columns)
        file, text = _text(path, number, columns[0], image), _text(path, number, columns[1], label)
        if not _is_unicode(text):  # JSON can hold half a character
            raise UserError(f"{path}, line {number}: {columns[1]} is {text!r}, which is no text")
        rows.append(_Row(number, file, text, _split(path, number, columns[2], split)))
    if not rows:
        raise UserError(f"{path}: names no image")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the number of each line and its values by column."""
    suffix = path.suffix.lower()
    if suffix not in _DELIMITERS and suffix not in _JSON_LINES:
        kinds = ", ".join([*_DELIMITERS, *_JSON_LINES])
        raise UserError(f"{path}: is no list by its name, which must end in one of {kinds}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix in _JSON_LINES:
                yield from _json_lines(path, file)
                return
            reader = csv.DictReader(file, delimiter=_DELIMITERS[suffix], strict=True)
            names = reader.fieldnames or []
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise UserError(f"{path}: has two columns {twice!r}; rename one of them")
            for values in reader:
                if None in values:
                    raise UserError(
                        f"{path}, line {reader.line_num}: has more values than there are columns"
                    )
                yield reader.line_num, values
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not in UTF-8; save it so") from None
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read as {suffix[1:].upper()}: {error}") from None


def _json_lines(path: Path, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {number}: is no JSON object")
        yield number, values


def _column(
    path: Path, known: list[str], given: str | None, usual: tuple[str, ...], what: str
) -> str:
    found = given if given is not None else next((own for own in usual if own in known), None)
    if found in known:
        return found
    columns = ", ".join(map(repr, known)) or "no column"
    if given is not None:
        raise UserError(f"{path}: has no column {given!r}{nearest(given, known)}; it has {columns}")
    raise UserError(
        f"{path}: has no column {' or '.join(usual)}; it has {columns}: say which with "
        f"--{what}_column (the first line of a CSV or TSV file names the columns)"
    )


def _split_column(path: Path, known: list[str], given: str | None) -> str | None:
    if given is not None:
        return _column(path, known, given, _SPLIT_COLUMNS, "split")
    return next((own for own in _SPLIT_COLUMNS if own in known), None)


def _text(path: Path, number: int, column: str, value: Any) -> str:
    """Returns a value as text: a label may be a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        told = "nothing" if value is None else json.dumps(value)
        raise UserError(f"{path}, line {number}: {column} is {told}, but must be text")
    text = str(value).strip()
    if not text or text.splitlines() != [text]:
        raise UserError(
            f"{path}, line {number}: {column} is {text!r}, but must be one line of text"
        )
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _split(path: Path, number: int, column: str | None, value: Any) -> str:
    if column is None:
        return "train"
    split = SPLITS.get(str(value).strip().lower())
    if split is None:
        raise UserError(
            f"{path}, line {number}: {column} is {value!r}, but must be one of {', '.join(SPLITS)}"
        )
    return split


def _without_repeats(path: Path, root: Path, rows: list[_Row]) -> list[_Row]:
    """Returns each image once, whether its path is written as ``1.jpg``, ``./1.jpg`` or in full."""
    first: dict[Path, _Row] = {}
    for row in rows:
        other = first.setdefault(root / row.file, row)
        if (other.label, other.split) != (row.label, row.split):
            raise UserError(
                f"{path}: {row.file} is {other.label!r} for {other.split} in line {other.number}, "
                f"but {row.label!r} for {row.split} in line {row.number}; keep one of them"
            )
    return list(first.values())


def _classes(path: Path, rows: list[_Row]) -> tuple[str, ...]:
    """Returns the classes, all of which training must have."""
    splits = defaultdict(set)
    for row in rows:
        splits[row.split].add(row.label)
    train = splits.pop("train", set())
    if not train:
        raise UserError(f"{path}: has no images for training")
    for split, labels in splits.items():
        unknown = sorted(labels - train)
        if unknown:
            raise UserError(
                f"{path}: {len(unknown)} classes of {split} have no images for training "
                f"({first_names([repr(own) for own in unknown])}){nearest(unknown[0], train)}"
            )
    if all(_WHOLE_NUMBER.fullmatch(label) for label in train):
        return tuple(sorted(train, key=lambda label: (int(label), label)))
    return tuple(sorted(train))


def _sizes(path: Path, root: Path, rows: list[_Row]) -> list[int]:
    missing = [row for row in rows if not (root / row.file).is_file()]
    if missing:
        names = [f"{row.file}, line {row.number}" for row in missing]
        raise UserError(
            f"{path}: {len(missing)} of {len(rows)} files are not in {root} "
            f"({'; '.join(names[:3])}); --image_dir says where they are"
        )
    return [size_of(root / row.file) for row in rows]
