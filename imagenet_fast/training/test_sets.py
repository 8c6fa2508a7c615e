"""Test sets of others: their classes by other names, some of the classes, several right labels."""

from __future__ import annotations

import csv
import io
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.outside import MAX_JSON, parse_json, read_bounded, read_json
from imagenet_fast.base.paths import to_path

SAME = "same"
_SHOWN = 3
_LENGTH = 100  # characters of a name in a message
_DIGITS = 100
_Class = Union[str, int]


class Competing(NamedTuple):
    """The classes of a model that a test set has, among which alone it is evaluated.

    Attributes:
      classes: their numbers in the model, ascending.
      numbers: for each class of the test set, its index among them.
    """

    classes: tuple[int, ...]
    numbers: tuple[int, ...]


def competing_classes(class_map: str, labels: Sequence[str], trained: Sequence[str]) -> Competing:
    """Returns the classes that compete in the evaluation on a test set.

    Args:
      class_map: a JSON or CSV file from the set's class names to the model's, or to their numbers;
        or ``same``: the set has the model's names or numbers. What it says of other classes is
        ignored, so that one file serves all sets of the same names.
      labels: the name of each class of the set.
      trained: the name of each class of the model.

    Raises:
      UserError: if the file cannot be read, or lacks a class of the set, or names one that the
        model lacks or has twice.
    """
    given: Mapping[str, _Class] = {label: label for label in labels}
    if class_map != SAME:
        given = _read_class_map(class_map)
    lacking = [label for label in labels if label not in given]
    if lacking:
        raise UserError(
            f"class_map: {class_map} does not say which class of the model is {_some(lacking)}"
        )
    counts = Counter(trained)
    twice = [given[label] for label in labels if counts[str(given[label])] > 1]
    if twice:
        raise UserError(
            f"class_map: the model has several classes named {_some(twice)}: give a number from 0"
        )
    numbers = [_number(given[label], trained) for label in labels]
    classes = [number for number in numbers if number is not None]
    unknown = [given[label] for label, number in zip(labels, numbers) if number is None]
    if unknown:
        raise UserError(
            f"class_map: the model has no class {_some(unknown)}; its classes are in labels.txt of "
            "its model_dir, numbered from 0"
        )
    found = sorted(set(classes))
    return Competing(tuple(found), tuple(map(found.index, classes)))


def _read_class_map(path: str) -> Mapping[str, _Class]:
    try:
        content = read_bounded(to_path(path), MAX_JSON)
        if not path.lower().endswith(".csv"):
            return parse_json(content, dict[str, _Class])
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig"))) if row]
        for number, row in enumerate(rows, start=1):
            if len(row) != 2:
                raise ValueError(f"row {number} has {len(row)} cells, but must have two")
        repeated = [name for name, count in Counter(name for name, _ in rows).items() if count > 1]
        if repeated:
            raise ValueError(f"several rows are of {_some(repeated)}")
        return dict(rows)
    except OSError as error:
        raise UserError(
            f"class_map: {path} cannot be read: {error.strerror}; give a file, or {SAME} if the "
            "classes have the model's names or numbers"
        ) from None
    except (ValueError, csv.Error) as error:
        raise UserError(
            f'class_map: {path} is neither a JSON object as {{"n01440764": "tench"}} nor, with '
            f"the suffix .csv, rows of two names: {error}"
        ) from None


def _number(name: _Class, trained: Sequence[str]) -> int | None:
    """Returns the number of a class of the model, given by its name or number."""
    text = str(name)
    if text in trained:
        return trained.index(text)
    # Python's int() refuses text of more than some thousand digits.
    known = text.isdecimal() and len(text) < _DIGITS and int(text) < len(trained)
    return int(text) if known else None


def _some(names: Sequence[_Class]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"{name!r:.{_LENGTH}}" for name in names[:_SHOWN]) + more


def read_right_labels(path: str, classes: int) -> list[list[int]] | dict[str, list[int]]:
    """Returns the right labels of images, from a JSON file.

    Args:
      path: of the file: a list for each image, in the order of their file names, as that of ReaL
        (Beyer et al. 2020, "Are we done with ImageNet?"), or an object of lists by file name. The
        labels are numbers of classes.
      classes: of the model.

    Raises:
      UserError: if it cannot be read, or has other labels.
    """
    kind: Any = Union[list[list[int]], dict[str, list[int]]]
    try:
        found = read_json(to_path(path), kind)
    except OSError as error:
        raise UserError(f"right_labels: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f"right_labels: {path} is no JSON list of lists of class numbers: {error}"
        ) from None
    lists = found.values() if isinstance(found, dict) else found
    others = {label for labels in lists for label in labels if not 0 <= label < classes}
    if others:
        raise UserError(
            f"right_labels: {path} has the label {min(others)}, but the model's are 0 to "
            f"{classes - 1}"
        )
    return found


def right_labels_of(
    path: str, found: list[list[int]] | dict[str, list[int]], files: Iterable[str]
) -> list[list[int]]:
    """Returns the right labels of each image.

    Args:
      path: of the file, for messages.
      found: of :func:`read_right_labels`.
      files: the name of each image. Folders before it matter only if the file has them for all.

    Raises:
      UserError: if the file is of other images.
    """
    names = list(files)
    if isinstance(found, dict) and all(name in found for name in names):
        by_name = found
    else:
        names = [pathlib.PurePosixPath(name).name for name in names]
        by_name = _by_name(path, found, names)
    missing = [name for name in names if name not in by_name]
    if missing:
        raise UserError(f"right_labels: {path} has no list for {_some(missing)}")
    if not any(by_name[name] for name in names):
        raise UserError(f"right_labels: {path} has no right label of any image")
    return [by_name[name] for name in names]


def _by_name(
    path: str, found: list[list[int]] | dict[str, list[int]], names: list[str]
) -> dict[str, list[int]]:
    """Returns the right labels of the images of these names, without folders."""
    keys = [pathlib.PurePosixPath(name).name for name in found] if isinstance(found, dict) else []
    counts = Counter(names) | Counter(keys)
    repeated = [name for name in names if counts[name] > 1]
    if repeated:
        raise UserError(
            f"right_labels: {repeated[0]!r} is the name of several images, which {path} cannot "
            "tell apart: give an object with the images' names as --predictions writes them"
        )
    if isinstance(found, dict):
        return dict(zip(keys, found.values()))
    if len(found) != len(names):
        raise UserError(
            f"right_labels: {path} has {len(found)} lists, but there are {len(names)} images"
        )
    return dict(zip(sorted(names), found))


def right_labels_accuracy(
    predicted: np.ndarray, right: Sequence[Sequence[int]]
) -> tuple[float, int]:
    """Returns the accuracy by the images' right labels, and the number of images that have any."""
    hits = [label in labels for label, labels in zip(predicted.tolist(), right) if len(labels)]
    return float(np.mean(hits)) if hits else 0.0, len(hits)
