"""Sources of labelled image files: holding out, fingerprints and warnings."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import Path, is_local
from imagenet_fast.data.examples import Label, classes_of
from imagenet_fast.data.images import BadImageError
from imagenet_fast.data.prepare.sources.base import Item, ListedFile, Source, printable
from imagenet_fast.data.prepare.sources.holdout import hold_out

_NAMED = 5  # examples in a warning
_REQUESTS_AT_ONCE = 64
# Maximum size of files to compare to find images in several classes, in bytes.
_COMPARED = 256 * 2**20
# Bytes of an image file: 89 million uncompressed RGB pixels.
MAX_IMAGE = 2**28

# How programs write that a value is missing.
_MISSING = ("na", "n/a", "#n/a", "nan", "null")
# A label that may be a measurement.
_NUMBER = re.compile(r"[-+]?(\d{1,100}|\d*[.]\d+)(e[-+]?\d{1,2})?", re.IGNORECASE)
# Between the names of several classes in one label.
_SEPARATORS = re.compile("[,;|]")

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pnm", ".avif", ".jp2", ".j2k"),
)

# Usual names of the splits.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    "test": "test",
}

Files = Mapping[str, list[ListedFile]]  # by split, with names relative to the data's directory


class FileSource(Source):
    """Image files with labels.

    Args:
      kind, name, labels, warnings: as ``Source``.
      root: the directory to which file names are relative.
      files: the images of each split.
      held_out: the fraction held out for validation and the seed, or None.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        root: Path,
        labels: tuple[str, ...],
        files: Files,
        warnings: Iterable[str] = (),
        held_out: tuple[float, int] | None = None,
    ) -> None:
        digest = hashlib.sha256()
        for split, members in files.items():
            for image in members:
                # Not the content, which takes long to read, nor the time, which copying changes.
                text = f"{split}\0{image.file}\0{image.size}\n"
                if not isinstance(image.label, int):  # labels are often edited, names rarely
                    text += f"{image.label}\n"
                digest.update(text.encode(errors="surrogateescape"))
        sizes = {split: len(members) for split, members in files.items()}
        super().__init__(kind, name, labels, sizes, digest.hexdigest(), warnings=warnings)
        labelled = (image.label for members in files.values() for image in members)
        self.multi_label = not all(isinstance(label, int) for label in labelled)
        self._root = root
        self.in_bucket = not is_local(root)
        self._files = dict(files)
        self._held_out = held_out

    def describe(self) -> dict[str, Any]:
        """As ``Source``."""
        held_out = list(self._held_out) if self._held_out else None
        return {**super().describe(), "held_out": held_out}

    def list_files(self) -> dict[str, list[ListedFile]]:
        """As ``Source``."""
        return self._files

    def opener(self) -> Callable[[Files | None], FileSource]:
        """As ``Source``."""
        return functools.partial(FileSource, self.kind, self.name, self._root, self.labels)

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is relative to the data set's directory."""
        file, label, *_ = self._files[split][index]
        try:
            return Item(read_image(self._root / file), label, printable(file))
        except BadImageError as error:
            return Item(error, label, printable(file))


def file_source(
    kind: str,
    name: str,
    root: Path,
    labels: tuple[str, ...],
    files: Files,
    warnings: Iterable[str],
    *,
    holdout: float,
    seed: int,
    place: Path,
) -> FileSource:
    """Returns a source of image files, with some held out if there is no validation split.

    Copies of an image and groups of images stay together. It warns of images in several classes and
    of classes without validation images.

    Args:
      kind: as ``Source``.
      name: as ``Source``.
      root: the directory to which file names are relative.
      labels: as ``Source``.
      files: the images of each split.
      warnings: further warnings.
      holdout: the fraction of each class to hold out; 0: none.
      seed: of the choice of held-out images.
      place: where users can add validation images.

    Raises:
      UserError: the fraction is not in [0, 1).
    """
    held_out = None
    if "validation" not in files:
        held_out = holdout, seed
        files = _hold_out_files(files, holdout, seed)
    grouped = any(image.group for image in files["train"])
    more_warnings = warnings_of_validation(
        labels,
        classes_of_all(image.label for image in files["validation"]),
        place,
        holdout if held_out else None,
        "group" if grouped else "of so few images",
    )
    warnings = (*warnings, *more_warnings, *_warnings_of_copies(root, files))
    return FileSource(kind, name, root, labels, files, warnings, held_out)


def _hold_out_files(files: Files, holdout: float, seed: int) -> dict[str, list[ListedFile]]:
    """Moves a fraction of each class from ``train`` to ``validation``."""
    train, others = files["train"], {k: v for k, v in files.items() if k != "train"}
    first = [image for image in train if not image.copy]
    groups = np.array([image.group for image in first]) if any(i.group for i in first) else None
    labels = [image.label for image in first]
    each_has_one = all(isinstance(label, int) for label in labels)
    out = hold_out(np.array(labels) if each_has_one else labels, holdout, seed, groups)
    held_out = {image.file for image, is_out in zip(first, out) if is_out}
    chosen = [image.file in held_out for image in train]
    return {
        "train": [image for image, out in zip(train, chosen) if not out],
        "validation": [image for image, out in zip(train, chosen) if out],
        **others,
    }


def classes_of_all(labels: Iterable[Label]) -> set[int]:
    """Returns all classes that images have."""
    return {own for label in labels for own in classes_of(label)}


def warnings_of_names(labels: Sequence[str]) -> Iterator[str]:
    """Warns of classes that seem to be the same, several, or measurements."""
    alike = defaultdict(list)
    for label in labels:
        alike[unicodedata.normalize("NFKC", label).casefold().strip()].append(label)
    names = [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]
    if names:
        yield (
            "classes differ only in case, spaces or the encoding of accents "
            f"({first_names(names)}): if they are the same, give them one name"
        )
    yield from _warnings_of_several(labels)
    missing = " and ".join(repr(label) for label in labels if label.lower() in _MISSING)
    if missing:
        yield f"{missing} are classes: remove their images if they mean that none is known"


def _warnings_of_several(labels: Sequence[str]) -> Iterator[str]:
    single = {label.strip() for label in labels}
    parts_of = {
        label: [part.strip() for part in parts]
        for label in labels
        if len(parts := _SEPARATORS.split(label)) > 1 and all(parts)
    }
    counts = Counter(part for parts in parts_of.values() for part in set(parts))
    several = [label for label, parts in parts_of.items() if single & set(parts)]
    sharing = [
        label for label, parts in parts_of.items() if any(counts[part] > 1 for part in parts)
    ]
    if 2 * len(sharing) >= len(labels) > 1:
        several = [label for label in parts_of if label in {*several, *sharing}]
    if several:
        separator = Counter(_SEPARATORS.findall("".join(several))).most_common(1)[0][0]
        yield (
            f"{counted(len(several), 'label')} of several classes, such as "
            f"{first_names([repr(label) for label in several])}: each is a class of its own here; "
            f"for several classes an image, give --label_separator='{separator}' with "
            "--source=list or huggingface"
        )
        return
    numbers = [label for label in labels if _NUMBER.fullmatch(label)]
    fractions = [label for label in numbers if not float(label).is_integer()]
    if len(labels) > 1 and len(numbers) == len(labels) and fractions:
        yield (
            f"the labels are numbers such as {fractions[0]}: each is a class of its own, because "
            "networks here learn classes, not measurements: make classes of ranges of them"
        )


def warnings_of_validation(
    labels: Sequence[str],
    measured: Collection[int],
    place: Path,
    holdout: float | None,
    least: str = "of so few images",
) -> Iterator[str]:
    """Warns of classes without validation images.

    Args:
      labels: the classes.
      measured: those with validation images, by number.
      place: where users can add images.
      holdout: the fraction that was held out; None: the data has a validation split.
      least: what is held out at least, after "one".
    """
    if holdout is None:
        advice = f"add some to {place}"
    elif holdout:
        advice = f"--holdout={holdout:g} is less than one {least}: increase it, or add images"
    else:
        advice = f"add some to {place}, or give another --holdout than 0"
    names = [repr(name) for label, name in enumerate(labels) if label not in measured]
    if not measured:
        yield f"there are no validation images to measure accuracy; {advice}"
    elif names:
        yield (
            "there are no validation images to measure the accuracy of "
            f"{counted(len(names), 'class', 'classes')} ({first_names(names)}); {advice}"
        )


def _warnings_of_copies(root: Path, files: Files) -> Iterator[str]:
    """Warns of images that are in several classes, byte for byte.

    Only files of equal size are read, up to a total size.
    """
    by_size = defaultdict(list)
    for members in files.values():
        for image in members:
            by_size[image.size].append(image)
    copies = []
    left = _COMPARED
    for size, members in sorted(by_size.items()):
        if not size or len({image.label for image in members}) < 2:
            continue
        left -= size * len(members)
        if left < 0:
            break
        by_content = defaultdict(list)
        for image in members:
            by_content[_content(root / image.file)].append(image)
        for same in by_content.values():
            first = same[0]
            other = next((image for image in same if image.label != first.label), None)
            if other:
                copies.append(f"{printable(first.file)} and {printable(other.file)}")
    if copies:
        several = any(not isinstance(one.label, int) for same in files.values() for one in same)
        what = "with other labels" if several else "in more than one class"
        yield f"{counted(len(copies), 'image')} {what}: {first_names(copies)}"


def _content(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return os.fsencode(path)  # unique; reading the image later raises the error


def first_names(names: Sequence[str]) -> str:
    """Returns the first names and the number of further ones."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def size_of(path: Path) -> int:
    """Returns the size of a file in bytes.

    Raises:
      UserError: if it is not a readable file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; fix or remove it") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a regular file; remove it")
    return status.st_size


def sizes_of(root: Path, files: Sequence[str]) -> list[int]:
    """Returns the sizes of files in a folder, asked for several at a time in a bucket.

    Raises:
      UserError: as ``size_of``.
    """
    paths = [root / file for file in files]
    if is_local(root):
        return list(map(size_of, paths))
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(size_of, paths))


def read_image(path: Path) -> bytes:
    """Returns the content of an image file.

    Raises:
      UserError: as ``size_of``, so that it does not block.
      BadImageError: if it is larger than ``MAX_IMAGE``.
      OSError: if it cannot be read.
    """
    check_size(size_of(path))
    return path.read_bytes()


def check_size(size: int) -> None:
    """Checks the size of an image file.

    Raises:
      BadImageError: if it is larger than ``MAX_IMAGE``.
    """
    if size > MAX_IMAGE:
        raise BadImageError(f"{size:,} bytes, more than the limit of {MAX_IMAGE:,}")
