"""Lists of image files and labels in CSV, TSV or JSON Lines."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.examples import Label
from imagenet_fast.data.prepare.sources.base import ListedFile, printable
from imagenet_fast.data.prepare.sources.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    FileSource,
    file_source,
    first_names,
    size_of,
    warnings_of_names,
)
from imagenet_fast.data.prepare.sources.inside import Inside
from imagenet_fast.data.prepare.sources.several import (
    SeveralLabels,
    check_no_flags,
    in_order,
    warnings_of_unused,
)

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
# Default names of columns; the first that exists is used.
_IMAGE_COLUMNS = ("image", "file_name", "filename", "file", "path", "image_path", "filepath")
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "class_name")
_SPLIT_COLUMNS = ("split", "set", "subset")
# Columns that usually name what several images are of.
_GROUP_COLUMNS = (
    *("group", "group_id", "patient", "patient_id", "subject", "subject_id", "participant_id"),
    *("video", "video_id", "scene", "scene_id", "session_id"),
)
# A first line that names the separator.
_SEPARATOR_LINE = re.compile(r"sep=([,;|\t])\s*", re.IGNORECASE)
_MAX_LINE = 2**20  # characters
_SHOWN = 100  # characters of a value in a message


class _Row(NamedTuple):
    """A line of the list."""

    number: int  # from 1
    file: str  # as written
    label: str | tuple[str, ...]  # several if the data has several labels an image
    split: str
    group: str  # of images that must be in one split; empty: none

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all its classes."""
        return (self.label,) if isinstance(self.label, str) else self.label


class _Columns(NamedTuple):
    """Names of columns, or None."""

    image: str | None
    label: str | None
    split: str | None
    group: str | None


def open_list(
    path: Path,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    label_separator: str | None = None,
    label_columns: str | None = None,
    allow_unlabelled: bool = False,
    image_dir: str | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    allow_outside: bool = False,
) -> FileSource:
    """Returns the images and labels listed by a CSV, TSV or JSON Lines file.

    The first line of a CSV or TSV file names its columns, which may be separated by another
    character than its name says. Labels are text; classes are numbered in alphabetical or, if all
    labels are integers, in numerical order. An image that is listed several times is there as
    often, in one split. There are warnings of that, of names that lack a suffix, or have
    backslashes or another case, of files in several classes, classes without validation images,
    and names of classes that look like the same, like several or like numbers.

    An image has several labels with ``label_separator`` or ``label_columns``, or if labels in JSON
    Lines are lists. It has those of all lines that list it, and is there once.

    Args:
      path: the list, ``.csv``, ``.tsv``, ``.jsonl`` or ``.ndjson``, in UTF-8.
      name: the data set's name; by default the list's.
      image_column: column of the file paths; by default ``image``, ``file_name``, ``filename``,
        ``file``, ``path``, ``image_path`` or ``filepath``.
      label_column: column of the labels; by default ``label``, ``class``, ``category``, ``target``,
        ``labels`` or ``class_name``.
      split_column: column of the splits, ``train``, ``validation`` (or ``val``, ``valid``, ``dev``)
        and ``test``; by default ``split``, ``set`` or ``subset``, if there is one.
      group_column: column of what several images are of, such as patients or videos, whose images
        are all in one split; by default each image is held out on its own.
      label_separator: between the names of several labels in the label column.
      label_columns: columns with 0 or 1, each a class, separated by commas; ``*``: all columns that
        are not used otherwise.
      allow_unlabelled: whether an image may have none of several labels.
      image_dir: the directory of the images, which relative paths start from; by default the
        list's.
      holdout: the fraction of each class to hold out if there are no validation images.
      seed: of the choice of held-out images.
      allow_outside: whether the list may name files outside of the images' directory, or links to
        such.

    Raises:
      UserError: the list cannot be read, lacks a column, a label or training images, lists a file
        that is missing, outside, or twice with different labels or splits, another split has a
        class that ``train`` lacks, or a group is in two splits.
    """
    path = path.resolve()
    notes: list[str] = []
    several = SeveralLabels(label_separator, label_columns, allow_unlabelled, label_column)
    given = _Columns(image_column, label_column, split_column, group_column)
    rows, class_columns = _read(path, given, several, notes)
    root = to_local_path(image_dir, "image_dir").resolve() if image_dir else path.parent
    rows = _with_files(path, root, rows, notes)
    _check_inside(path, root, rows, allow_outside)
    labels = _classes(path, rows, class_columns)
    _check_groups(path, rows)
    numbers = {label: number for number, label in enumerate(labels)}
    files: dict[str, list[ListedFile]] = {"train": []}
    multi_label = not isinstance(rows[0].label, str)
    copies = list(
        _with_all_labels(path, root, rows) if multi_label else _with_copies(path, root, rows, notes)
    )
    unlabelled = [f"{printable(row.file)}, line {row.number}" for row, _ in copies if not row.label]
    several.check_labelled(path, len(copies), unlabelled, multi_label=multi_label)
    for row, copy in copies:
        label: Label = (
            numbers[row.label]
            if isinstance(row.label, str)
            else tuple(sorted(numbers[name] for name in row.label))
        )
        image = ListedFile(row.file, label, size_of(root / row.file), copy, row.group)
        files.setdefault(row.split, []).append(image)
    files = {split: sorted(images) for split, images in files.items()}
    trained = {name for row in rows if row.split == "train" for name in row.labels}
    return file_source(
        "list",
        name or printable(path.stem),
        root,
        labels,
        files,
        (*notes, *warnings_of_names(labels), *warnings_of_unused(labels, trained)),
        holdout=holdout,
        seed=seed,
        place=path,
    )


def _read(
    path: Path, given: _Columns, several: SeveralLabels, notes: list[str]
) -> tuple[list[_Row], list[str]]:
    """Returns the lines of a list, and its columns with 0 or 1; adds notes on how it was read."""
    rows: list[_Row] = []
    flags: list[str] = []
    columns: _Columns | None = None
    usual = (*_IMAGE_COLUMNS, *_LABEL_COLUMNS, *_SPLIT_COLUMNS, *_GROUP_COLUMNS)
    named = (name.strip().lower() for name in (*given, *(several.columns or "").split(",")) if name)
    for number, values in _lines(path, notes, {*usual, *named}):
        if columns is None:
            columns = _columns(path, list(values), given, several)
            flags = several.classes(path, list(values), columns)
            unused = _known(list(values), _GROUP_COLUMNS)
            used = {*columns, *flags}
            if unused and unused not in used and columns[2:] == (None, None):
                notes.append(
                    f"{path.name}: {unused!r} is ignored: images of one {unused} may be in both "
                    f"splits, where they make accuracy look better; --group_column={unused} keeps "
                    "them in one"
                )
            if columns.image in columns[1:]:
                raise UserError(
                    f"{path}: the column {columns.image!r} cannot be that of the images and another"
                )
        if columns.split is None and (late := _known(list(values), _SPLIT_COLUMNS)):
            raise UserError(
                f"{path}, line {number}: has {late!r}, which the first line lacks: give the split "
                "of each image"
            )
        place = f"{path}, line {number}"
        file = _text(place, columns.image, values)
        label = None if columns.label is None else values.get(columns.label)
        text: str | tuple[str, ...]
        if columns.label is None:
            text = several.flagged(place, flags, values)
        elif (
            several.separator
            or isinstance(label, list)
            or (several.allow_unlabelled and values.get(columns.label, 0) is None)
        ):
            text = several.names(f"{place}: {columns.label}", label)
        else:
            text = _text(place, columns.label, values)
        split = "train" if columns.split is None else _split(place, columns.split, values)
        group = _text(place, columns.group, values)
        rows.append(_Row(number, file, text, split, group))
    if not rows:
        raise UserError(f"{path}: lists no image")
    if not all(isinstance(row.label, str) for row in rows):  # of JSON, some or all are lists
        rows = [row._replace(label=row.labels) for row in rows]
        check_no_flags(path, [row.labels for row in rows])
    return rows, flags


def _lines(
    path: Path, notes: list[str], known: Collection[str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the number of each line and its values by column; notes an unusual separator.

    ``known`` has the names that columns may have, in lower case.
    """
    suffix = path.suffix.lower()
    if suffix not in _DELIMITERS and suffix not in _JSON_LINES:
        kinds = ", ".join([*_DELIMITERS, *_JSON_LINES])
        raise UserError(f"{path}: the name of a list must end in one of {kinds}")
    if path.exists() and not path.is_file():  # a pipe would block
        raise UserError(f"{path}: is not a regular file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _bounded_lines(path, file)
            if suffix in _JSON_LINES:
                yield from _json_lines(path, lines)
                return
            header, before = next(lines, ""), 0
            if told := _SEPARATOR_LINE.fullmatch(header):  # as Excel reads and writes it
                header, before = next(lines, ""), 1
            usual = _DELIMITERS[suffix]
            delimiter = told[1] if told else _delimiter(header, usual, known)
            if delimiter != _DELIMITERS[suffix]:
                notes.append(f"{path.name}: its columns are separated by {delimiter!r}")
            whole = itertools.chain([header], lines)
            reader = csv.DictReader(whole, delimiter=delimiter, strict=True, skipinitialspace=True)
            counts = Counter(reader.fieldnames or [])
            twice = next((name for name, count in counts.items() if count > 1), None)
            if twice is not None:
                raise UserError(f"{path}: has two columns {twice!r}; rename one of them")
            for values in reader:
                if None in values:
                    raise UserError(
                        f"{path}, line {before + reader.line_num}: has more values than columns"
                    )
                yield before + reader.line_num, values
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not in UTF-8; save it in UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read as {suffix[1:].upper()}: {error}") from None


def _delimiter(header: str, usual: str, known: Collection[str]) -> str:
    """Returns the character that separates the columns that a header names.

    It is that which makes the most names known ones; of equals ``usual``, then the first in it.
    """
    found = [mark for mark in (usual, *_DELIMITERS.values(), ";", "|") if mark in header]

    def known_names(mark: str) -> int:
        names = next(csv.reader([header], delimiter=mark, skipinitialspace=True), [])
        return sum(name.strip().lower() in known for name in names)

    return max(found, key=known_names, default=usual)


def _bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise UserError(f"{path}, line {number}: has more than {_MAX_LINE:,} characters")
        yield line


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {number}: is not a JSON object")
        yield number, values


def _column(
    path: Path, known: list[str], given: str | None, usual: tuple[str, ...], what: str
) -> str:
    column = _known(known, usual if given is None else (given,))
    if column is not None:
        return column
    columns = ", ".join(map(repr, known)) or "no column"
    if given is not None:
        raise UserError(f"{path}: has no column {given!r}{nearest(given, known)}; it has {columns}")
    raise UserError(
        f"{path}: has no column {' or '.join(usual)}; it has {columns}: give the right one with "
        f"--{what}_column (the first line of a CSV or TSV file names the columns)"
    )


def _known(known: list[str], names: tuple[str, ...]) -> str | None:
    """Returns the first of some names that there is, if need be in another case."""
    by_case = {own.strip().lower(): own for own in reversed(known)}
    found = [name for name in names if name in known]
    found += [by_case[name.lower()] for name in names if name.lower() in by_case]
    return found[0] if found else None


def _columns(path: Path, known: list[str], given: _Columns, several: SeveralLabels) -> _Columns:
    """Returns the columns, of those that there are."""
    image = _column(path, known, given.image, _IMAGE_COLUMNS, "image")
    label, split, group = None, _known(known, _SPLIT_COLUMNS), None
    if not several.columns:
        label = _column(path, known, given.label, _LABEL_COLUMNS, "label")
    if given.split is not None:
        split = _column(path, known, given.split, (), "split")
    if given.group is not None:
        group = _column(path, known, given.group, (), "group")
    return _Columns(image, label, split, group)


def _text(place: str, column: str | None, values: Mapping[str, Any]) -> str:
    """Returns a value, which may be a number, as text; empty if there is no column of it."""
    if column is None:
        return ""
    value = values.get(column)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        shown = "missing" if value is None else json.dumps(value)[:_SHOWN]
        raise UserError(f"{place}: {column} is {shown}, but must be text")
    text = str(value).strip()
    if not text or text.splitlines() != [text]:
        raise UserError(f"{place}: {column} is {text[:_SHOWN]!r}, but must be one line of text")
    return text


def _split(place: str, column: str, values: Mapping[str, Any]) -> str:
    value = values.get(column)
    split = SPLITS.get(str(value).strip().lower())
    if split is None:
        raise UserError(f"{place}: {column} is {value!r}, but must be one of {', '.join(SPLITS)}")
    return split


def _with_copies(
    path: Path, root: Path, rows: list[_Row], notes: list[str]
) -> Iterator[tuple[_Row, int]]:
    """Yields the lines, and the number of earlier ones that list the same file.

    Paths may be written as ``1.jpg``, ``./1.jpg`` or absolute; each has the name of the first.
    """
    first: dict[Path, _Row] = {}
    counts: Counter[Path] = Counter()
    for row in rows:
        file = Path(os.path.normpath(root / row.file))
        other = first.setdefault(file, row)
        if (other.label, other.split) != (row.label, row.split):
            raise UserError(
                f"{path}: {row.file} is {other.label!r} in {other.split} in line {other.number}, "
                f"but {row.label!r} in {row.split} in line {row.number}; keep one of them"
            )
        if other.group != row.group:
            raise UserError(
                f"{path}: {row.file} is of the group {other.group!r} in line {other.number}, but "
                f"of {row.group!r} in line {row.number}; keep one of them"
            )
        yield other, counts[file]
        counts[file] += 1
    repeated = len(rows) - len(first)
    if repeated:
        notes.append(
            f"{counted(repeated, 'line')} of {path.name} with an image that is listed before: it "
            "is in the data as often as it is listed, in one split"
        )


def _with_all_labels(path: Path, root: Path, rows: list[_Row]) -> Iterator[tuple[_Row, int]]:
    """Yields each file once, with the labels of all lines that list it, and 0."""
    found: dict[Path, _Row] = {}
    for row in rows:
        file = Path(os.path.normpath(root / row.file))
        other = found.setdefault(file, row)
        if (other.split, other.group) != (row.split, row.group):
            raise UserError(
                f"{path}: {row.file} is in another split or group in line {other.number} than in "
                f"line {row.number}; keep one of them"
            )
        found[file] = other._replace(label=tuple(dict.fromkeys((*other.label, *row.label))))
    yield from ((row, 0) for row in found.values())


def _classes(path: Path, rows: list[_Row], columns: list[str]) -> tuple[str, ...]:
    """Returns the classes, after checking that ``train`` has all of them.

    Args:
      path: the list.
      rows: its lines.
      columns: those that are classes; empty: none are.
    """
    splits: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        splits[row.split].update(row.labels)
    if "train" not in splits:
        raise UserError(f"{path}: has no training images")
    train = splits.pop("train")
    if not train:
        raise UserError(f"{path}: no training image has a label")
    for split, labels in splits.items():
        unknown = sorted(labels - train)
        if unknown:
            raise UserError(
                f"{path}: {counted(len(unknown), 'class', 'classes')} of {split} without training "
                f"images ({first_names([repr(label) for label in unknown])})"
                f"{nearest(unknown[0], train)}"
            )
    return tuple(columns) or in_order(train)


def _check_groups(path: Path, rows: list[_Row]) -> None:
    """Checks that no group is in two splits."""
    first: dict[str, _Row] = {}
    for row in rows:
        other = first.setdefault(row.group, row)
        if row.group and other.split != row.split:
            raise UserError(
                f"{path}: the group {row.group!r} is in {other.split} in line {other.number}, but "
                f"in {row.split} in line {row.number}; put its images in one split"
            )


def _with_files(path: Path, root: Path, rows: list[_Row], notes: list[str]) -> list[_Row]:
    """Returns the lines with the names of files that exist.

    A name that is no file's may have backslashes for slashes, another case, or lack the suffix.
    """
    names: dict[Path, dict[str, list[str]]] = {}
    found, missing = [], []
    backslashes, similar = [], []
    for row in rows:
        file = row.file
        try:
            exists = (root / file).is_file()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            missing.append(row)
            continue
        if not exists:
            file = file.replace("\\", "/")
            if not (root / file).is_file():
                other = _similar(root, file, names)
                if other is None:
                    missing.append(row)
                    continue
                similar.append(f"{printable(file)} is {printable(other)}")
                file = other
            if "\\" in row.file:
                backslashes.append(printable(row.file))
        found.append(row._replace(file=file))
    if missing:
        advice = "give their directory with --image_dir"
        if len(missing) < len(rows) / 2:
            advice = "add them, or remove their lines"
        raise UserError(
            f"{path}: {len(missing)} of {counted(len(rows), 'file')} missing in {root} "
            f"({_places(missing)}); {advice}"
        )
    if backslashes:
        notes.append(f"{path.name} has paths with backslashes: {first_names(backslashes)}")
    if similar:
        notes.append(
            f"{path.name} has names without a suffix, or in another case: {first_names(similar)}"
        )
    return found


def _similar(root: Path, name: str, names: dict[Path, dict[str, list[str]]]) -> str | None:
    """Returns the only image whose name is as given in another case, or plus a suffix; or None.

    It adds to ``names``, for each folder, its images by their names in lower case, with and without
    suffix.
    """
    folder = (root / name).parent
    if folder not in names:
        of_folder = names[folder] = defaultdict(list)
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.name.lower().endswith(IMAGE_SUFFIXES):
                of_folder[file.name.lower()].append(file.name)
                of_folder[file.stem.lower()].append(file.name)
    files = names[folder].get(Path(name).name.lower(), [])
    if len(files) != 1 or not (folder / files[0]).is_file():
        return None
    return str(Path(name).with_name(files[0]))


def _check_inside(path: Path, root: Path, rows: list[_Row], allow_outside: bool) -> None:
    """Checks that the files are in the directory of the images."""
    inside = Inside(root)
    outside = [row for row in rows if not allow_outside and root / row.file not in inside]
    if outside:
        raise UserError(
            f"{path}: {len(outside)} of {counted(len(rows), 'file')} outside of {root} "
            f"({_places(outside)}); give --allow_outside if you know who made the list, or the "
            "directory of all images with --image_dir"
        )


def _places(rows: list[_Row]) -> str:
    return "; ".join(f"{printable(row.file)}, line {row.number}" for row in rows[:3])
