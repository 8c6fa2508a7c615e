"""ImageNet (ILSVRC 2012), read from the three files of image-net.org."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tqdm import tqdm

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.prepare.sources.base import Item, Source, printable
from imagenet_fast.data.prepare.sources.files import MAX_IMAGE
from imagenet_fast.data.prepare.sources.imagenet_meta import rows_of_meta
from imagenet_fast.data.prepare.sources.tars import BadTarError, TarReader, open_tar

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"

# In the development kit: all synsets, and the class number of each validation image.
_META = "data/meta.mat"
_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"

# Names of text versions of these two lists.
_SYNSET_LISTS = (
    "synset_words.txt",
    "synsets.txt",
    "LOC_synset_mapping.txt",
    "imagenet_lsvrc_2015_synsets.txt",
)
_VALIDATION_LABELS = ("imagenet_2012_validation_synset_labels.txt",)

_CLASSES = 1000
_IMAGES = {"train": 1_281_167, "validation": 50_000}

_MAX_IMAGES = 2_000_000  # of a tar
_MAX_LIST = 2**25  # bytes of a list as text
# Bytes of the development kit, unpacked, of which the two files take 1 MB, and its members.
_MAX_DEVKIT = 2**26
_MAX_DEVKIT_MEMBERS = 1000


class _Member(NamedTuple):
    """An image in a tar file: its name, label, and offset and size in bytes."""

    name: str
    label: int
    offset: int
    size: int


class _Classes(NamedTuple):
    """Synsets in alphabetical order, their class names, and the file that lists them."""

    synsets: tuple[str, ...]
    names: tuple[str, ...]
    file: Path


class _ValidationLabels(NamedTuple):
    """The synset of each validation image, in the order of file names, and the file of the list."""

    synsets: tuple[str, ...]
    file: Path


class TarSource(Source):
    """Images in uncompressed tar files, read without unpacking.

    Args:
      synsets, labels, warnings: as ``Source``.
      tars: the tar file of each split.
      members: the images of each split.
    """

    def __init__(
        self,
        synsets: tuple[str, ...],
        labels: tuple[str, ...],
        tars: Mapping[str, Path],
        members: Mapping[str, list[_Member]],
        warnings: Iterable[str],
    ) -> None:
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
        """As ``Source``; the filename is that in the tar."""
        image = self._members[split][index]
        # pread uses no file position, so threads do not interfere.
        data = os.pread(self._files[split].fileno(), image.size, image.offset)
        if len(data) < image.size:
            raise OSError(f"{self._paths[split]} ends within {image.name}")
        return Item(data, image.label, image.name)


def open_imagenet(
    path: Path,
    synsets: str | os.PathLike[str] | None = None,
    validation_labels: str | os.PathLike[str] | None = None,
) -> TarSource:
    """Returns ImageNet from the directory of the three files of image-net.org.

    The two tars of images are indexed (which takes minutes on a slow disk), but not unpacked.
    Classes are numbered in alphabetical order of their synsets, as in all published models. The
    development kit, for which SciPy is needed, is used if one of the lists is missing as text.

    Args:
      path: the directory of ``ILSVRC2012_img_train.tar``, a tar of one tar per synset,
        ``ILSVRC2012_img_val.tar`` and ``ILSVRC2012_devkit_t12.tar.gz``.
      synsets: a list of the synsets in alphabetical order, one per line, optionally followed by the
        class name (``n01440764 tench, Tinca tinca``). By default ``synset_words.txt``,
        ``synsets.txt``, ``LOC_synset_mapping.txt`` or ``imagenet_lsvrc_2015_synsets.txt`` in
        ``path``, else the development kit's.
      validation_labels: the synset of each validation image, one per line, in the order of file
        names. By default ``imagenet_2012_validation_synset_labels.txt`` in ``path``, else the
        development kit's.

    Raises:
      UserError: a file is missing or cannot be read, the lists and the tars do not match, or SciPy
        is needed but not installed.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    classes, validation = _read_lists(
        path,
        _given_or_found(synsets, path, _SYNSET_LISTS),
        _given_or_found(validation_labels, path, _VALIDATION_LABELS),
    )
    tars = {"train": path / TRAIN_TAR, "validation": path / VALIDATION_TAR}
    members = {
        "train": _index_train(tars["train"], classes),
        "validation": _index_validation(tars["validation"], classes, validation),
    }
    warnings = [
        f"{tars[split]} has {counted(len(members[split]), 'image')}, but ImageNet {expected:,}"
        for split, expected in _IMAGES.items()
        if len(classes.synsets) == _CLASSES and len(members[split]) != expected
    ]
    return TarSource(classes.synsets, classes.names, tars, members, warnings)


def _given_or_found(
    given: str | os.PathLike[str] | None, directory: Path, names: tuple[str, ...]
) -> Path | None:
    if given is not None:
        return to_local_path(given, "the list of classes or labels")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _read_lists(
    directory: Path, classes_file: Path | None, validation_file: Path | None
) -> tuple[_Classes, _ValidationLabels]:
    """Reads the text files, and what they lack from the development kit."""
    classes = None if classes_file is None else _read_classes(classes_file)
    validation = None if validation_file is None else _read_validation_labels(validation_file)
    if classes is not None and validation is not None:
        return classes, validation
    devkit_classes, devkit_validation = _read_devkit(directory / DEVKIT)
    return classes or devkit_classes, validation or devkit_validation


def _read_lines(path: Path) -> list[str]:
    try:
        return read_bounded(path, _MAX_LIST).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _read_classes(path: Path) -> _Classes:
    lines = [line.split(maxsplit=1) for line in _read_lines(path) if line.strip()]
    synsets = tuple(words[0] for words in lines)
    if not synsets:
        raise UserError(f"{path}: is empty")
    # A CSV with a header, or a list of another kind or order, would give wrong labels.
    if list(synsets) != sorted(set(synsets)):
        raise UserError(
            f"{path}: must list each synset once, in alphabetical order, which is the order of the "
            "labels of published models"
        )
    return _Classes(synsets, tuple(words[-1].strip() for words in lines), path)


def _read_validation_labels(path: Path) -> _ValidationLabels:
    synsets = tuple(_read_lines(path))
    if any(synset.isdigit() for synset in synsets):
        raise UserError(
            f"{path}: has numbers, whose order differs between publishers; give synsets such as "
            f"n01440764, one per line, or {DEVKIT} instead of this file"
        )
    return _ValidationLabels(synsets, path)


def _read_devkit(path: Path) -> tuple[_Classes, _ValidationLabels]:
    files = _unpack_devkit(path)
    meta, ground_truth = path / _META, path / _GROUND_TRUTH
    classes = _parse_meta(files[_META], meta)
    validation = []
    for line, number in enumerate(files[_GROUND_TRUTH].decode(errors="replace").split(), 1):
        if not re.fullmatch(r"\d{1,4}", number) or int(number) not in classes:
            raise UserError(f"{ground_truth}, line {line}: {number[:20]!r} is not a class number")
        validation.append(classes[int(number)][0])
    synsets, names = zip(*sorted(classes.values()))
    return _Classes(synsets, names, meta), _ValidationLabels(tuple(validation), ground_truth)


def _unpack_devkit(path: Path) -> dict[str, bytes]:
    """Returns the two relevant files of the development kit, by name."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; download it from image-net.org, or give both lists as text: "
            "synsets and validation_labels"
        )
    found = {}
    try:
        # Read completely, so gzip verifies its checksum: damaged data can crash SciPy.
        with gzip.open(path) as file:
            unpacked = file.read(_MAX_DEVKIT + 1)
        if len(unpacked) > _MAX_DEVKIT:
            raise BadTarError(f"it has more than {_MAX_DEVKIT:,} bytes")
        with open_tar(io.BytesIO(unpacked), max_members=_MAX_DEVKIT_MEMBERS) as tar:
            for member in tar:
                name = "/".join(PurePosixPath(member.name).parts[-2:])
                if name in (_META, _GROUND_TRUTH):
                    found[name] = tar.read(member, _MAX_DEVKIT)
    except (BadTarError, OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is not a complete .tar.gz file; download it again from image-net.org: {error}"
        ) from error
    for name in (_META, _GROUND_TRUTH):
        if name not in found:
            raise UserError(f"{path}: is not ILSVRC 2012's development kit: it has no {name}")
    return found


def _parse_meta(data: bytes, path: Path) -> dict[int, tuple[str, str]]:
    """Returns the synset and the name of each class, by ILSVRC's numbers, which start at 1.

    The file has a struct array ``synsets`` with a row for each class and, with higher numbers, for
    each of their ancestors in WordNet.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UserError(f"{path}: reading it needs SciPy: {how_to_install('imagenet')}")
    try:
        rows = rows_of_meta(data)
    except ValueError as error:
        raise UserError(f"{path}: is not ILSVRC 2012's: {error}") from None
    classes = {number: (synset, words) for number, synset, words in rows if number <= _CLASSES}
    synsets = {synset for synset, _ in classes.values()}
    if (
        not classes
        or sorted(classes) != list(range(1, len(classes) + 1))
        or len(synsets) < len(classes)
        or not all(re.fullmatch(r"n\d{8}", synset) for synset in synsets)
    ):
        raise UserError(f"{path}: is not ILSVRC 2012's: its classes are not synsets 1, 2, ...")
    return classes


@contextmanager
def _open_tar(path: Path, file: IO[bytes] | None = None) -> Iterator[TarReader]:
    """Opens ``path``, or ``file``, a tar in it; what is wrong with it becomes a ``UserError``."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    try:
        with open_tar(path if file is None else file, max_members=_MAX_IMAGES) as tar:
            yield tar
    except BadTarError as error:
        raise UserError(f"{path}: is not a complete, uncompressed tar file: {error}") from error


def _images(tar: TarReader, path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields the name, offset and size of each image in a tar."""
    for image in tar:
        if image.size > MAX_IMAGE:
            raise UserError(
                f"{path}: {image.name} has {image.size:,} bytes, but may have {MAX_IMAGE:,}"
            )
        yield image.name, image.offset_data, image.size


def _index_train(path: Path, classes: _Classes) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(classes.synsets)}
    found: dict[str, list[_Member]] = {}
    with _open_tar(path) as outer:
        for member in tqdm(outer, f"indexing {path.name}", len(numbers), unit="class", delay=2):
            synset = PurePosixPath(member.name).stem
            if synset not in numbers:
                raise UserError(f"{path}: {member.name} is not a synset in {classes.file}")
            with _open_tar(path, outer.open(member)) as inner:
                found[synset] = [
                    _Member(printable(name), numbers[synset], member.offset_data + offset, size)
                    for name, offset, size in _images(inner, path)
                ]
            if sum(map(len, found.values())) > _MAX_IMAGES:
                raise UserError(f"{path}: has more than {_MAX_IMAGES:,} images")
    missing = [synset for synset in numbers if not found.get(synset)]
    if missing:
        raise UserError(f"{path}: has no image of {missing[0]}, which {classes.file} lists")
    return [image for synset in numbers for image in found[synset]]


def _index_validation(
    path: Path, classes: _Classes, validation: _ValidationLabels
) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(classes.synsets)}
    with _open_tar(path) as tar:
        images = sorted(_images(tar, path))
    if len(images) != len(validation.synsets):
        raise UserError(
            f"{path} has {counted(len(images), 'image')}, but {validation.file} "
            f"{counted(len(validation.synsets), 'line')}"
        )
    members = []
    for line, ((name, offset, size), synset) in enumerate(zip(images, validation.synsets), 1):
        if synset not in numbers:
            raise UserError(f"{validation.file}, line {line}: {synset!r} is not in {classes.file}")
        members.append(_Member(printable(name), numbers[synset], offset, size))
    return members
