"""Class folders: image files in a folder for each class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.paths import is_local
from imagenet_fast.data.prepare.sources.base import ListedFile, printable
from imagenet_fast.data.prepare.sources.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    FileSource,
    file_source,
    first_names,
    sizes_of,
    warnings_of_names,
)
from imagenet_fast.data.prepare.sources.inside import Inside

# Windows creates these in folders of images, and these folders file systems, archives and servers.
_IGNORED = ("thumbs.db", "desktop.ini")
_NO_CLASSES = (
    *("@eadir", "__macosx", "#recycle", "#snapshot", "$recycle.bin", "lost+found"),
    *("system volume information",),
)
_VALIDATION = tuple(name for name, split in SPLITS.items() if split == "validation")


def open_folders(
    path: Path, name: str | None = None, holdout: float = 0.1, seed: int = 0
) -> FileSource:
    """Returns the images in ``train/CLASS/`` and ``validation/CLASS/``, or just in ``CLASS/``.

    ``training`` is as good as ``train``. With either, ``test/CLASS/`` becomes the split ``test``,
    which is never used for validation. Classes are numbered in alphabetical order. Images may be in
    subfolders of their class folder, also behind links, but no folder counts twice. Hidden files
    and folders of file systems, such as ``@eaDir``, are ignored. There are warnings of other
    ignored files, a single class, classes without validation images, classes whose names differ
    only in case, images in several classes, and images that links take from outside of the
    directory.

    Args:
      path: the directory; in a bucket, a ``BucketPath``. Its validation folder may be named
        ``validation``, ``val``, ``valid`` or ``dev``.
      name: the data set's name; by default the directory's.
      holdout: the fraction of each class to hold out if there is no validation folder.
      seed: of the choice of held-out images.

    Raises:
      UserError: there is no such directory, something in it cannot be read, a folder's name is
        ambiguous, there are two validation folders, two class folders are the same, a training
        class has no image, a class name is not one line of UTF-8, or another split has a class that
        ``train`` lacks.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    folders = _split_folders(path)
    labels = _class_names(folders["train"])
    warnings = [*warnings_of_names(labels)]
    if folders["train"] != path:
        used = {folder.name for folder in folders.values()}
        others = [printable(name) for name in _names(path) if name not in used]
        if others:
            names = first_names(others)
            warnings.append(f"folders beside {folders['train'].name} are ignored: {names}")
    if "test" in folders and not set(_names(folders["test"])) & set(labels):
        warnings.append(
            f"{folders['test']} is ignored: it has none of the class folders of {folders['train']}"
        )
        del folders["test"]
    for folder in folders.values():
        _check_classes(folder, folders["train"], labels)
    files = _list_images(path, folders, labels, warnings)
    if len(labels) == 1:
        warnings.append(
            f"there is only one class, {labels[0]}: the folders of the classes must be directly in "
            f"{folders['train']}"
        )
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


def images_in(folder: Path) -> list[Path]:
    """Returns the images in a folder and its subfolders, sorted, as :func:`open_folders` has them.

    Raises:
      UserError: if a folder cannot be read.
    """
    found = _walk(folder, {}, [])
    return sorted(
        path
        for path in found
        if path.name.lower().endswith(IMAGE_SUFFIXES) and not _is_ignored(path.name)
    )


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in _IGNORED


def _split_folders(path: Path) -> dict[str, Path]:
    """Returns the folder of each split.

    Raises:
      UserError: if a folder with the name of a split would be a class or ignored.
    """
    there = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir()}
    folders = {"train": path}
    train = next((name for name in ("train", "training") if name in there), None)
    if train is not None:
        folders = {"train": there.pop(train)}
        validation = [there.pop(name) for name in _VALIDATION if name in there]
        if len(validation) > 1:
            raise UserError(
                f"{validation[0]} and {validation[1]}: both names mean validation; keep one of them"
            )
        if validation:
            folders["validation"] = validation[0]
        if "test" in there:
            folders["test"] = there.pop("test")
    for name, entry in there.items():
        if name.lower() in SPLITS:
            raise UserError(
                f"{entry}: has the name of a split, not of a class; put class folders for training "
                f"into {path}/train, for validation, if any, into {path}/validation (or val, valid "
                f"or dev), and for a final test into {path}/test"
            )
    return folders


def _names(folder: Path) -> list[str]:
    """Returns the names of the class folders in a folder."""
    names = []
    for entry in sorted(folder.iterdir()):
        if not _is_class(entry.name):
            continue
        if entry.is_symlink() and not entry.exists():
            raise UserError(f"{entry}: is a broken link; fix or remove it")
        if entry.is_dir():
            names.append(entry.name)
    return names


def _is_class(name: str) -> bool:
    """Whether a folder of this name is a class, or a part of one."""
    return not name.startswith(".") and name.lower() not in _NO_CLASSES


def _class_names(folder: Path) -> tuple[str, ...]:
    names = _names(folder)
    if not names and folder.name in SPLITS:
        raise UserError(
            f"{folder}: has no class folders: if {folder.name} is itself a class, rename it, "
            "because its name is that of a split"
        )
    if not names:
        raise UserError(f"{folder}: has no class folders")
    return tuple(names)


def _check_classes(folder: Path, train: Path, labels: tuple[str, ...]) -> None:
    """Checks that ``train`` has all classes of a split."""
    unknown = sorted(set(_class_names(folder)) - set(labels))
    if unknown:
        raise UserError(
            f"{folder / unknown[0]}: {train} has no such class{nearest(unknown[0], labels)}"
        )


def _list_images(
    root: Path, folders: Mapping[str, Path], labels: tuple[str, ...], warnings: list[str]
) -> dict[str, list[ListedFile]]:
    """Returns the images of each split, sorted; warns of ignored files."""
    # By resolved path. Links to these folders are not followed: their images belong elsewhere.
    visited = {folder.resolve(): folder for folder in (root, *folders.values())}
    for folder in folders.values():
        for name in _names(folder):
            place = (folder / name).resolve()
            if place in visited:
                raise UserError(
                    f"{folder / name} and {visited[place]} are the same folder, but images can be "
                    "in one class and split only; remove one of them"
                )
            visited[place] = folder / name
    files = {}
    inside, outside = Inside(root), 0
    left_out: Counter[str] = Counter()
    links: list[Path] = []
    strays: list[str] = []
    for split, folder in folders.items():
        found: list[tuple[str, int]] = []
        strays += [
            printable(path.relative_to(root).as_posix())
            for path in sorted(folder.iterdir())
            if path.name.lower().endswith(IMAGE_SUFFIXES) and not path.is_dir()
        ]
        for label, name in enumerate(labels):
            if not (folder / name).is_dir():
                continue  # only training needs images of each class
            for path in _walk(folder / name, visited, links):
                if _is_ignored(path.name):
                    continue
                if path.name.lower().endswith(IMAGE_SUFFIXES):
                    found.append((path.relative_to(root).as_posix(), label))
                    outside += is_local(root) and path not in inside
                else:
                    left_out[printable(path.suffix.lower())] += 1
        sizes = sizes_of(root, [file for file, _ in found])
        files[split] = sorted(ListedFile(*image, size) for image, size in zip(found, sizes))
    if left_out:  # perhaps images of other formats
        kinds = [f"{suffix or 'without a suffix'} {n}" for suffix, n in left_out.most_common()]
        warnings.append(
            f"files without an image's suffix ({', '.join(IMAGE_SUFFIXES)}) are ignored: "
            f"{first_names(kinds)}"
        )
    if links:
        names = [printable(link.relative_to(root).as_posix()) for link in links]
        warnings.append(f"links to folders that count elsewhere are ignored: {first_names(names)}")
    if outside:
        warnings.append(f"links that lead outside of {root} give {counted(outside, 'image')}")
    if strays:
        warnings.append(f"images outside of class folders are ignored: {first_names(strays)}")
    return files


def _walk(folder: Path, visited: dict[Path, Path], links: list[Path]) -> Iterator[Path]:
    """Yields the files in a class folder and its subfolders that are not hidden.

    It adds to ``visited`` the folders that count, by their resolved paths, and to ``links`` those
    to such folders.
    """
    if not is_local(folder):
        yield from _walk_bucket(folder)
        return

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for name, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        directory = Path(name)
        place = directory.resolve()
        if visited.setdefault(place, directory) != directory:
            links.append(directory)
            folders.clear()
            continue
        # Sorted, so of two links to the same folder always the same one counts.
        folders[:] = sorted(filter(_is_class, folders))
        yield from (directory / file for file in files)


def _walk_bucket(folder: Path) -> Iterator[Path]:
    """Yields the same files in a bucket."""
    for path in sorted(folder.iterdir()):
        # To ask what each image is would take long.
        if path.name.lower().endswith(IMAGE_SUFFIXES) or not path.is_dir():
            yield path
        elif _is_class(path.name):
            yield from _walk_bucket(path)
