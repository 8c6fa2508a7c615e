"""Images that are files of their own, each with a label: what sources of such have in common."""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.sources.base import Item, ListedFile, Source, printable
from imagenet_fast.data.sources.holdout import hold_out

_NAMED = 5  # of what is warned of
# Read of images of equal size to find those that are in several classes, in bytes.
_COMPARED = 256 * 2**20

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pnm", ".avif", ".jp2", ".j2k"),
)

# What others call the splits.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    "test": "test",
}

Files = Mapping[str, list[ListedFile]]  # by split; names are relative to the data set's directory


class FileSource(Source):
    """Image files with labels."""

    def __init__(
        self,
        kind: str,
        name: str,
        root: Path,
        labels: tuple[str, ...],
        files: Files,
        warnings: tuple[str, ...] = (),
        held_out: tuple[float, int] | None = None,
    ) -> None:
        """Initializes the source.

        Args:
          kind: As ``Source``.
          name: As ``Source``.
          root: The directory that the files' names are relative to.
          labels: As ``Source``.
          files: The images of each split.
          warnings: As ``Source``.
          held_out: The fraction that was held out for validation, and the seed; None: nothing was.
        """
        digest = hashlib.sha256()
        for split, members in files.items():
            for file, _, size in members:
                # Not the content, for ImageNet has 140 GB of it, nor the time, which copying loses.
                digest.update(f"{split}\0{file}\0{size}\n".encode(errors="surrogateescape"))
        sizes = {split: len(members) for split, members in files.items()}
        super().__init__(kind, name, labels, sizes, digest.hexdigest(), warnings=warnings)
        self._root = root
        self._files = dict(files)
        self._held_out = held_out

    def describe(self) -> dict[str, Any]:
        """As ``Source``."""
        held_out = list(self._held_out) if self._held_out else None
        return {**super().describe(), "held_out": held_out}

    def list_files(self) -> dict[str, list[ListedFile]]:
        """As ``Source``."""
        return self._files

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is relative to the data set's directory."""
        file, label, _ = self._files[split][index]
        return Item((self._root / file).read_bytes(), label, printable(file))


def file_source(
    kind: str,
    name: str,
    root: Path,
    labels: tuple[str, ...],
    files: Files,
    warnings: tuple[str, ...],
    *,
    holdout: float,
    seed: int,
    place: Path,
) -> FileSource:
    """Returns a source of files, of which some are held out where none is for validation.

    Images in several classes, and classes without validation images, are warned of.

    Args:
      kind: As ``Source``.
      name: As ``Source``.
      root: The directory that the files' names are relative to.
      labels: As ``Source``.
      files: The images of each split.
      warnings: What else looks odd.
      holdout: The fraction of each class to hold out.
      seed: Which images are held out.
      place: Where people add images for validation.

    Raises:
      UserError: The fraction is not between 0 and 1.
    """
    if "validation" in files:
        held_out, advice = None, f"put some into {place}"
    else:
        held_out = holdout, seed
        files = _hold_out_files(files, holdout, seed)
        advice = (
            f"--holdout={holdout:g} takes none of so few images: give a greater one, or more images"
        )
    warnings += _warnings_of_classes(labels, files["validation"], advice)
    warnings += _warnings_of_copies(root, labels, files)
    return FileSource(kind, name, root, labels, files, warnings, held_out)


def _hold_out_files(files: Files, holdout: float, seed: int) -> dict[str, list[ListedFile]]:
    """Returns the splits with some of each class moved from ``train`` to ``validation``."""
    train, others = files["train"], {k: v for k, v in files.items() if k != "train"}
    chosen = hold_out(np.array([image.label for image in train]), holdout, seed)
    return {
        "train": [image for image, out in zip(train, chosen) if not out],
        "validation": [image for image, out in zip(train, chosen) if out],
        **others,
    }


def warnings_of_names(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what to say of classes that look like one."""
    alike = defaultdict(list)
    for label in labels:
        alike[unicodedata.normalize("NFKC", label).casefold().strip()].append(label)
    names = [" and ".join(map(repr, own)) for own in alike.values() if len(own) > 1]
    if not names:
        return ()
    return (
        "classes differ in case, spaces or accents' encoding alone "
        f"({first_names(names)}): if they are one, give them one name",
    )


def _warnings_of_classes(
    labels: tuple[str, ...], validation: list[ListedFile], advice: str
) -> tuple[str, ...]:
    """Returns what to say of the classes of which training cannot measure the accuracy."""
    measured = {image.label for image in validation}
    names = [repr(name) for label, name in enumerate(labels) if label not in measured]
    if not names:
        return ()
    if not measured:
        return (f"there are no validation images, by which to measure accuracy; {advice}",)
    return (
        f"{len(names)} of {len(labels)} classes have no validation images, by which to measure "
        f"accuracy ({first_names(names)}); {advice}",
    )


def _warnings_of_copies(root: Path, labels: tuple[str, ...], files: Files) -> tuple[str, ...]:
    """Returns what to say of images that are in several classes, byte for byte.

    Only files of equal size are read, and not all of them where there are many.
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
    if not copies:
        return ()
    return (f"{len(copies)} images are in more than one class, such as {first_names(copies)}",)


def _content(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return os.fsencode(path)  # When the image's turn comes, that is an error.


def first_names(names: Sequence[str]) -> str:
    """Returns the first of many names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def size_of(path: Path) -> int:
    """Returns the bytes in a file.

    Raises:
      UserError: if there is none that can be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; mend or remove it") from error
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is no file that can be read; remove it")
    return found.st_size
