"""ImageNet (ILSVRC 2012) straight from the two tar files that image-net.org gives out."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tqdm import tqdm

from imagenet_fast.data.sources.base import Item, Source
from imagenet_fast.errors import UserError

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"

# The names under which these two lists are commonly found.
_SYNSET_LISTS = (
    "synset_words.txt",
    "synsets.txt",
    "LOC_synset_mapping.txt",
    "imagenet_lsvrc_2015_synsets.txt",
)
_VALIDATION_LABELS = ("imagenet_2012_validation_synset_labels.txt",)

_CLASSES = 1000
_IMAGES = {"train": 1_281_167, "validation": 50_000}


class _Member(NamedTuple):
    """An image within a tar file: its name, label, and place in bytes."""

    name: str
    label: int
    offset: int
    size: int


class TarSource(Source):
    """Images that are read from where they lie in uncompressed tar files."""

    def __init__(
        self,
        synsets: tuple[str, ...],
        labels: tuple[str, ...],
        tars: Mapping[str, Path],
        members: Mapping[str, list[_Member]],
        warnings: Iterable[str],
    ) -> None:
        """Initialises the source.

        Args:
          synsets: As ``Source``.
          labels: As ``Source``.
          tars: The tar file of each split.
          members: The images of each split.
          warnings: As ``Source``.
        """
        digest = hashlib.sha256()
        for split, images in members.items():
            for image in images:
                digest.update("\0".join((split, *map(str, image), "\n")).encode())
        sizes = {split: len(images) for split, images in members.items()}
        super().__init__(
            "imagenet", "imagenet2012", labels, sizes, digest.hexdigest(), synsets, warnings
        )
        self._members = dict(members)
        self._paths = dict(tars)
        self._files = {split: path.open("rb") for split, path in tars.items()}

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename is the one within the tar."""
        image = self._members[split][index]
        # pread has no file position that threads could take from each other.
        data = os.pread(self._files[split].fileno(), image.size, image.offset)
        if len(data) < image.size:
            raise OSError(f"{self._paths[split]} ends within {image.name}")
        return Item(data, image.label, image.name)


def open_imagenet(
    path: Path, synsets: Path | None = None, validation_labels: Path | None = None
) -> TarSource:
    """Returns ImageNet from the directory of its two tar files.

    Both are indexed once (some minutes for the real ones on a slow disk) and never unpacked.
    Classes are numbered in alphabetical order of their synsets, as in all published models.

    Args:
      path: The directory of ``ILSVRC2012_img_train.tar``, a tar of one tar per synset, and
        ``ILSVRC2012_img_val.tar``.
      synsets: A list of the synsets in alphabetical order, one a line, which the class's words may
        follow (``n01440764 tench, Tinca tinca``). By default ``synset_words.txt``,
        ``synsets.txt``, ``LOC_synset_mapping.txt`` or ``imagenet_lsvrc_2015_synsets.txt`` in
        ``path``.
      validation_labels: The synset of each validation image, one a line, in the order of the
        images' names. By default ``imagenet_2012_validation_synset_labels.txt`` in ``path``.

    Raises:
      UserError: A file is missing or cannot be read, or the lists and the tars don't agree.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    list_path = synsets or _find(path, _SYNSET_LISTS, "the synset list", "synsets")
    ids, labels = _read_synsets(list_path)
    labels_path = validation_labels or _find(
        path, _VALIDATION_LABELS, "the validation labels", "validation_labels"
    )
    tars = {"train": path / TRAIN_TAR, "validation": path / VALIDATION_TAR}
    members = {
        "train": _index_train(tars["train"], ids, list_path),
        "validation": _index_validation(tars["validation"], labels_path, ids, list_path),
    }
    warnings = [
        f"{tars[split]} has {len(members[split])} images, where ImageNet has {expected}"
        for split, expected in _IMAGES.items()
        if len(ids) == _CLASSES and len(members[split]) != expected
    ]
    return TarSource(ids, labels, tars, members, warnings)


def _find(directory: Path, names: tuple[str, ...], what: str, option: str) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"{directory}: no {names[0]} in it; name {what} with {option}=")


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _read_synsets(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the synsets and the names of the classes."""
    lines = [line.split(maxsplit=1) for line in _read_lines(path) if line.strip()]
    ids = tuple(words[0] for words in lines)
    if not ids:
        raise UserError(f"{path}: is empty")
    # A CSV with a header, a list of another kind or of another order would give wrong labels.
    if list(ids) != sorted(set(ids)):
        raise UserError(
            f"{path}: must list each synset once, in alphabetical order, which is the order of the "
            "labels of published models"
        )
    return ids, tuple(words[-1].strip() for words in lines)


def _open_tar(path: Path, file: IO[bytes] | None = None) -> tarfile.TarFile:
    """Opens ``path``, or ``file``, a tar within it."""
    try:
        return tarfile.open(path, "r:", file)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: is not a whole, uncompressed tar file: {error}") from error


def _files(tar: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    try:
        for member in tar:
            if member.isfile():
                yield member
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: is not a whole, uncompressed tar file: {error}") from error


def _index_train(path: Path, synsets: tuple[str, ...], list_path: Path) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(synsets)}
    found: dict[str, list[_Member]] = {}
    with _open_tar(path) as outer:
        for member in tqdm(
            _files(outer, path), f"indexing {path.name}", len(synsets), unit="class", delay=2
        ):
            synset = PurePosixPath(member.name).stem
            if synset not in numbers:
                raise UserError(f"{path}: {member.name} is of no synset in {list_path}")
            with _open_tar(path, outer.extractfile(member)) as inner:
                found[synset] = [
                    _Member(
                        image.name,
                        numbers[synset],
                        member.offset_data + image.offset_data,
                        image.size,
                    )
                    for image in _files(inner, path)
                ]
    missing = [synset for synset in synsets if not found.get(synset)]
    if missing:
        raise UserError(f"{path}: has no image of {missing[0]}, which {list_path} lists")
    return [image for synset in synsets for image in found[synset]]


def _index_validation(
    path: Path, labels_path: Path, synsets: tuple[str, ...], list_path: Path
) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(synsets)}
    answers = _read_lines(labels_path)
    with _open_tar(path) as tar:
        images = sorted(_files(tar, path), key=lambda image: image.name)
    if len(images) != len(answers):
        raise UserError(f"{path} has {len(images)} images but {labels_path} {len(answers)} lines")
    members = []
    for line, (image, synset) in enumerate(zip(images, answers), 1):
        if synset.isdigit():
            raise UserError(
                f"{labels_path}: holds numbers, whose order differs between publishers; synsets "
                "like n01440764 are needed, one a line"
            )
        if synset not in numbers:
            raise UserError(f"{labels_path}, line {line}: {synset!r} is not in {list_path}")
        members.append(_Member(image.name, numbers[synset], image.offset_data, image.size))
    return members
