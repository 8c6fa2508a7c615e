"""Folders of class folders: the usual shape of a data set of one's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.data.sources.base import ListedFile, printable
from imagenet_fast.data.sources.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    FileSource,
    file_source,
    first_names,
    size_of,
    warnings_of_names,
)

# What Windows leaves in folders of images.
_IGNORED = ("thumbs.db", "desktop.ini")
_VALIDATION = tuple(name for name, split in SPLITS.items() if split == "validation")


def open_folders(
    path: Path, name: str | None = None, holdout: float = 0.1, seed: int = 0
) -> FileSource:
    """Returns the images in ``train/CLASS/`` and ``validation/CLASS/``, or just in ``CLASS/``.

    Beside ``train/`` there may be ``test/CLASS/``, which becomes the split ``test``, and is never
    taken for validation. Classes are numbered in alphabetical order. Images may lie deeper within
    their class folder, also behind links, but no folder counts twice. What is hidden is ignored;
    whatever else is left out is warned of, as are classes without validation images, classes whose
    names differ in case alone and images in several classes.

    Args:
      path: The directory. Its validation folder may be named ``validation``, ``val``, ``valid`` or
        ``dev``.
      name: The data set's name; by default the directory's.
      holdout: The fraction of each class to hold out where there is no validation folder.
      seed: Which images are held out.

    Raises:
      UserError: There is no such directory, something in it cannot be read, a folder by its name is
        no class and no split, there are two folders for validation, two class folders are the same
        one, a class folder for training holds no image, a class' name is no text, or there is a
        class in another split that the training folder has not.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    folders = _split_folders(path)
    labels = _class_names(folders["train"])
    warnings = warnings_of_names(labels)
    if "test" in folders and not set(_names(folders["test"])) & set(labels):
        warnings += (
            f"{folders['test']} is left out: it has no folder of a class in {folders['train']}",
        )
        del folders["test"]
    for folder in folders.values():
        _check_classes(folder, folders["train"], labels)
    files, more_warnings = _list_images(path, folders, labels)
    warnings += more_warnings
    empty = set(range(len(labels))) - {image.label for image in files["train"]}
    if empty:
        folder = folders["train"] / labels[min(empty)]
        raise UserError(f"{folder}: no image ({', '.join(IMAGE_SUFFIXES)}) in it")
    return file_source(
        "folders",
        name or printable(path.name),
        path,
        labels,
        files,
        warnings,
        holdout=holdout,
        seed=seed,
        place=folders.get("validation", path),
    )


def _split_folders(path: Path) -> dict[str, Path]:
    """Returns the folders of class folders by the splits that they are.

    Raises:
      UserError: if a folder would be a class, or ignored, that by its name is a split.
    """
    there = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir()}
    folders = {"train": path}
    if "train" in there:
        folders = {"train": there.pop("train")}
        validation = [there.pop(name) for name in _VALIDATION if name in there]
        if len(validation) > 1:
            raise UserError(
                f"{validation[0]} and {validation[1]}: both are for validation by their names; "
                "keep one of them"
            )
        if validation:
            folders["validation"] = validation[0]
        if "test" in there:
            folders["test"] = there.pop("test")
    for name, entry in there.items():
        if name.lower() in SPLITS:
            raise UserError(
                f"{entry}: is no class by its name; put the class folders for training into "
                f"{path}/train, those for validation, if there are any, into {path}/validation "
                f"(or val, valid or dev), and those for a test at the end into {path}/test"
            )
    return folders


def _warnings_of_files(left_out: Counter[str]) -> tuple[str, ...]:
    """Returns what to say of files that may be images of other kinds."""
    if not left_out:
        return ()
    kinds = [f"{suffix or 'without a suffix'} {n}" for suffix, n in left_out.most_common()]
    return (
        f"files that are not named like images ({', '.join(IMAGE_SUFFIXES)}) are left out: "
        f"{first_names(kinds)}",
    )


def _warnings_of_links(root: Path, links: list[Path]) -> tuple[str, ...]:
    """Returns what to say of folders that were not entered."""
    if not links:
        return ()
    names = [printable(link.relative_to(root).as_posix()) for link in links]
    return (f"links to folders that count in another place are left out: {first_names(names)}",)


def _names(folder: Path) -> list[str]:
    """Returns the names of the class folders in a folder."""
    names = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink() and not entry.exists():
            raise UserError(f"{entry}: is a link to nothing; mend or remove it")
        if entry.is_dir():
            names.append(entry.name)
    return names


def _class_names(folder: Path) -> tuple[str, ...]:
    names = _names(folder)
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


def _check_classes(folder: Path, train: Path, labels: tuple[str, ...]) -> None:
    """Checks that a split has no class that training has not."""
    unknown = sorted(set(_class_names(folder)) - set(labels))
    if unknown:
        raise UserError(
            f"{folder / unknown[0]}: there is no such class in {train}{nearest(unknown[0], labels)}"
        )


def _list_images(
    root: Path, folders: Mapping[str, Path], labels: tuple[str, ...]
) -> tuple[dict[str, list[ListedFile]], tuple[str, ...]]:
    """Returns the images in the class folders of each split, always in the same order.

    Also what to say of what is left out.
    """
    # A link to one of these, or to what another link has led to, leads no further: behind it are
    # other classes' images.
    taken = {folder.resolve(): folder for folder in (root, *folders.values())}
    for folder in folders.values():
        for name in _names(folder):
            place = (folder / name).resolve()
            if place in taken:
                raise UserError(
                    f"{folder / name} and {taken[place]} are the same folder, but images can be of "
                    "one class and split only; remove one of them"
                )
            taken[place] = folder / name
    files = {}
    left_out: Counter[str] = Counter()
    links: list[Path] = []
    strays: list[str] = []
    for split, folder in folders.items():
        images = []
        strays += [
            printable(path.relative_to(root).as_posix())
            for path in sorted(folder.iterdir())
            if path.name.lower().endswith(IMAGE_SUFFIXES) and not path.is_dir()
        ]
        for label, name in enumerate(labels):
            if not (folder / name).is_dir():
                continue  # Only training needs images of each class.
            for path in _walk(folder / name, taken, links):
                known = path.name.lower()
                if known.startswith(".") or known in _IGNORED:
                    continue
                if known.endswith(IMAGE_SUFFIXES):
                    file = path.relative_to(root).as_posix()
                    images.append(ListedFile(file, label, size_of(path)))
                else:
                    left_out[printable(path.suffix.lower())] += 1
        files[split] = sorted(images)
    warnings = (*_warnings_of_files(left_out), *_warnings_of_links(root, links))
    if strays:
        warnings += (f"images that are in no class folder are left out: {first_names(strays)}",)
    return files, warnings


def _walk(folder: Path, taken: dict[Path, Path], links: list[Path]) -> Iterator[Path]:
    """Yields the files in a class folder and those below that are not hidden.

    Args:
      folder: the class folder.
      taken: by their real paths, the folders that count; added to.
      links: those that lead to one of these; added to.
    """

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for name, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        directory = Path(name)
        place = directory.resolve()
        if taken.setdefault(place, directory) != directory:
            links.append(directory)
            folders.clear()
            continue
        # Of two ways to the same folder, always the same one is taken.
        folders[:] = sorted(own for own in folders if not own.startswith("."))
        yield from (directory / file for file in files)
