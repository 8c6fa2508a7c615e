"""Folders of class folders: the usual shape of a data set of one's own."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from imagenet_fast.data.sources.base import Item, Source, printable
from imagenet_fast.data.sources.holdout import hold_out
from imagenet_fast.errors import UserError, nearest

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp")
# What Windows leaves in folders of images.
_IGNORED = ("thumbs.db", "desktop.ini")
_VALIDATION = ("validation", "val", "test")
_SPLIT_NAMES = ("train", "training", *_VALIDATION)
_NAMED = 5  # of the classes, or of the kinds of files, that are warned of

_Files = list[tuple[str, int]]  # name relative to the data set's directory, label


class FolderSource(Source):
    """Image files in folders named after their classes."""

    def __init__(
        self,
        name: str,
        root: Path,
        labels: tuple[str, ...],
        files: Mapping[str, _Files],
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Initializes the source.

        Args:
          name: As ``Source``.
          root: The directory that the files' names are relative to.
          labels: As ``Source``.
          files: For each split the images' names and labels.
          warnings: As ``Source``.

        Raises:
          UserError: A file is not there, as one that a link leads to.
        """
        digest = hashlib.sha256()
        for split, members in files.items():
            for file, _ in members:
                # Not the content, for ImageNet has 140 GB of it, nor the time, which copying loses.
                line = f"{split}\0{file}\0{_size(root / file)}\n"
                digest.update(line.encode(errors="surrogateescape"))
        sizes = {split: len(members) for split, members in files.items()}
        super().__init__("folders", name, labels, sizes, digest.hexdigest(), warnings=warnings)
        self._root = root
        self._files = dict(files)

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is relative to the data set's directory."""
        file, label = self._files[split][index]
        return Item((self._root / file).read_bytes(), label, printable(file))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; mend or remove it") from error


def open_folders(
    path: Path, name: str | None = None, holdout: float = 0.1, seed: int = 0
) -> FolderSource:
    """Returns the images in ``train/CLASS/`` and ``validation/CLASS/``, or just in ``CLASS/``.

    Classes are numbered in alphabetical order. Images may lie deeper within their class folder,
    also behind links, but no folder counts twice. Hidden files are ignored; other files that are
    not named like an image, and classes without validation images, are warned of.

    Args:
      path: The directory. Its validation folder may be named ``validation``, ``val`` or ``test``;
        the first of these that exists is taken.
      name: The data set's name; by default the directory's.
      holdout: The fraction of each class to hold out where there is no validation folder.
      seed: Which images are held out.

    Raises:
      UserError: There is no such directory, something in it cannot be read, a class folder for
        training holds no image, a class' name is no text or that of a split, or the validation
        folder has a class that the training folder has not.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    train = path / "train" if (path / "train").is_dir() else path
    validation = next((path / name for name in _VALIDATION if (path / name).is_dir()), None)
    if train == path or not validation:
        _check_no_split(path, train)
    labels = _class_names(train)
    files, left_out = _list_images(path, train, labels)
    empty = set(range(len(labels))) - {label for _, label in files}
    if empty:
        raise UserError(f"{train / labels[min(empty)]}: no image ({', '.join(_SUFFIXES)}) in it")
    if validation:
        unknown = sorted(set(_class_names(validation)) - set(labels))
        if unknown:
            raise UserError(
                f"{validation / unknown[0]}: there is no such class in {train}"
                f"{nearest(unknown[0], labels)}"
            )
        validation_files, more_left_out = _list_images(path, validation, labels)
        splits = {"train": files, "validation": validation_files}
        left_out += more_left_out
        advice = f"put some into {validation}"
    else:
        if not 0 < holdout < 1:
            raise UserError(f"the fraction to hold out must be between 0 and 1, not {holdout}")
        chosen = hold_out(np.array([label for _, label in files]), holdout, seed)
        splits = {
            "train": [file for file, out in zip(files, chosen) if not out],
            "validation": [file for file, out in zip(files, chosen) if out],
        }
        advice = (
            f"--holdout={holdout:g} takes none of so few images: give a greater one, or more images"
        )
    warnings = (
        *_warnings_of_files(left_out),
        *_warnings_of_classes(labels, splits["validation"], advice),
    )
    return FolderSource(name or printable(path.name), path, labels, splits, warnings)


def _warnings_of_files(left_out: Counter[str]) -> tuple[str, ...]:
    """Returns what to say of files that may be images of other kinds."""
    if not left_out:
        return ()
    kinds = [f"{suffix or 'without a suffix'} {n}" for suffix, n in left_out.most_common()]
    return (
        f"files that are not named like images ({', '.join(_SUFFIXES)}) are left out: "
        f"{_first(kinds)}",
    )


def _warnings_of_classes(
    labels: tuple[str, ...], validation: _Files, advice: str
) -> tuple[str, ...]:
    """Returns what to say of the classes of which training cannot measure the accuracy."""
    measured = {label for _, label in validation}
    names = [repr(name) for label, name in enumerate(labels) if label not in measured]
    if not names:
        return ()
    if not measured:
        return (f"there are no validation images, by which to measure accuracy; {advice}",)
    return (
        f"{len(names)} of {len(labels)} classes have no validation images, by which to measure "
        f"accuracy ({_first(names)}); {advice}",
    )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _check_no_split(path: Path, train: Path) -> None:
    """Checks that no folder would be a class, or ignored, that by its name is a split."""
    for entry in sorted(path.iterdir()):
        if entry != train and entry.is_dir() and entry.name.lower() in _SPLIT_NAMES:
            raise UserError(
                f"{entry}: is no class by its name; put the class folders for training into "
                f"{path}/train, and those for validation, if there are any, into {path}/validation "
                "(or val, or test)"
            )


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )
    if not names:
        raise UserError(f"{folder}: has no class folders in it")
    for name in names:
        if name != printable(name):
            raise UserError(
                f"{folder / name}: the name of a class must be UTF-8; rename the folder"
            )
        if name.splitlines() != [name]:
            raise UserError(
                f"{str(folder / name)!r}: the name of a class must be one line; rename the folder"
            )
    return tuple(names)


def _list_images(root: Path, folder: Path, labels: tuple[str, ...]) -> tuple[_Files, Counter[str]]:
    """Returns the images in the class folders in ``folder``, always in the same order.

    Also how many other files there are, by suffix.
    """
    files = []
    left_out: Counter[str] = Counter()
    for label, name in enumerate(labels):
        if not (folder / name).is_dir():
            continue  # There need not be validation images of each class.
        for path in _walk(folder / name):
            known = path.name.lower()
            if known.startswith(".") or known in _IGNORED:
                continue
            if known.endswith(_SUFFIXES):
                files.append((path.relative_to(root).as_posix(), label))
            else:
                left_out[printable(path.suffix.lower())] += 1
    return sorted(files), left_out


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and those below, each once where links lead in circles."""

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    walked = set()
    for name, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        directory = Path(name)
        place = directory.resolve()
        if place in walked:
            folders.clear()
            continue
        walked.add(place)
        folders.sort()  # Of two ways to the same folder, always the same one is taken.
        yield from (directory / file for file in files)
