"""ImageNet (ILSVRC 2012) straight from the three files that image-net.org gives out."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data.sources.base import Item, Source, printable

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"

# Within the development kit: all synsets, and the number of each validation image's.
_META = "data/meta.mat"
_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"

# The names under which others publish these two lists as text.
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


class _Classes(NamedTuple):
    """Synsets in alphabetical order, the names of these classes, and the file that lists them."""

    synsets: tuple[str, ...]
    names: tuple[str, ...]
    file: Path


class _Answers(NamedTuple):
    """The synset of each validation image in the order of their names, and the file of them."""

    synsets: tuple[str, ...]
    file: Path


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
        """Initializes the source.

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
    path: Path,
    synsets: str | os.PathLike[str] | None = None,
    validation_labels: str | os.PathLike[str] | None = None,
) -> TarSource:
    """Returns ImageNet from the directory of the three files that image-net.org gives out.

    Both tars of images are indexed once (some minutes for the real ones on a slow disk) and never
    unpacked. Classes are numbered in alphabetical order of their synsets, as in all published
    models. The development kit, which SciPy reads, is needed only where one of the lists is not
    there as text.

    Args:
      path: The directory of ``ILSVRC2012_img_train.tar``, a tar of one tar per synset,
        ``ILSVRC2012_img_val.tar`` and ``ILSVRC2012_devkit_t12.tar.gz``.
      synsets: A list of the synsets in alphabetical order, one a line, which the class's words may
        follow (``n01440764 tench, Tinca tinca``). By default ``synset_words.txt``,
        ``synsets.txt``, ``LOC_synset_mapping.txt`` or ``imagenet_lsvrc_2015_synsets.txt`` in
        ``path``, else what the development kit says.
      validation_labels: The synset of each validation image, one a line, in the order of the
        images' names. By default ``imagenet_2012_validation_synset_labels.txt`` in ``path``, else
        what the development kit says.

    Raises:
      UserError: A file is missing or cannot be read, the lists and the tars don't agree, or SciPy
        is needed and not installed.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    classes, answers = _read_lists(
        path,
        _given_or_found(synsets, path, _SYNSET_LISTS),
        _given_or_found(validation_labels, path, _VALIDATION_LABELS),
    )
    tars = {"train": path / TRAIN_TAR, "validation": path / VALIDATION_TAR}
    members = {
        "train": _index_train(tars["train"], classes),
        "validation": _index_validation(tars["validation"], classes, answers),
    }
    warnings = [
        f"{tars[split]} has {len(members[split])} images, where ImageNet has {expected}"
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
    directory: Path, classes_file: Path | None, answers_file: Path | None
) -> tuple[_Classes, _Answers]:
    """Reads the files that there are, and what else is needed from the development kit."""
    classes = None if classes_file is None else _read_classes(classes_file)
    answers = None if answers_file is None else _read_answers(answers_file)
    if classes is not None and answers is not None:
        return classes, answers
    devkit_classes, devkit_answers = _read_devkit(directory / DEVKIT)
    return classes or devkit_classes, answers or devkit_answers


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _read_classes(path: Path) -> _Classes:
    lines = [line.split(maxsplit=1) for line in _read_lines(path) if line.strip()]
    synsets = tuple(words[0] for words in lines)
    if not synsets:
        raise UserError(f"{path}: is empty")
    # A CSV with a header, a list of another kind or of another order would give wrong labels.
    if list(synsets) != sorted(set(synsets)):
        raise UserError(
            f"{path}: must list each synset once, in alphabetical order, which is the order of the "
            "labels of published models"
        )
    return _Classes(synsets, tuple(words[-1].strip() for words in lines), path)


def _read_answers(path: Path) -> _Answers:
    answers = tuple(_read_lines(path))
    if any(answer.isdigit() for answer in answers):
        raise UserError(
            f"{path}: holds numbers, whose order differs between publishers; synsets like "
            f"n01440764 are needed, one a line, or {DEVKIT} instead of this file"
        )
    return _Answers(answers, path)


def _read_devkit(path: Path) -> tuple[_Classes, _Answers]:
    files = _unpack_devkit(path)
    meta, ground_truth = path / _META, path / _GROUND_TRUTH
    classes = _parse_meta(files[_META], meta)
    answers = []
    for line, number in enumerate(files[_GROUND_TRUTH].decode(errors="replace").split(), 1):
        if not number.isdecimal() or int(number) not in classes:
            raise UserError(f"{ground_truth}, line {line}: {number!r} is no class's number")
        answers.append(classes[int(number)][0])
    synsets, names = zip(*sorted(classes.values()))
    return _Classes(synsets, names, meta), _Answers(tuple(answers), ground_truth)


def _unpack_devkit(path: Path) -> dict[str, bytes]:
    """Returns the two files of the development kit that matter, by name."""
    found = {}
    try:
        # All of it, for gzip to compare its checksum: damaged data may crash SciPy.
        with gzip.open(path) as file, tarfile.open(fileobj=io.BytesIO(file.read())) as tar:
            for member in tar:
                name = "/".join(PurePosixPath(member.name).parts[-2:])
                content = tar.extractfile(member)
                if content and name in (_META, _GROUND_TRUTH):
                    found[name] = content.read()
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file; get it from image-net.org, or give both lists as text: synsets "
            "and validation_labels"
        ) from error
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is not a whole .tar.gz file, get it again from image-net.org: {error}"
        ) from error
    for name in (_META, _GROUND_TRUTH):
        if name not in found:
            raise UserError(f"{path}: has no {name}, so it is not ILSVRC 2012's development kit")
    return found


def _parse_meta(data: bytes, path: Path) -> dict[int, tuple[str, str]]:
    """Returns the synset and the words of each class, by ILSVRC's numbers, which start at 1.

    The file has a struct array ``synsets`` with one row for each class and, under higher numbers,
    for each of their ancestors in WordNet.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UserError(f"{path}: reading it needs SciPy: {how_to_install('imagenet')}") from error
    try:
        table = loadmat(io.BytesIO(data), squeeze_me=True, variable_names=["synsets"])["synsets"]
        columns = [np.atleast_1d(table[name]) for name in ("ILSVRC2012_ID", "WNID", "words")]
        rows = [(int(number), str(synset), str(words)) for number, synset, words in zip(*columns)]
    except Exception as error:  # SciPy may raise whatever for a foreign file.
        raise UserError(f"{path}: is not ILSVRC 2012's: {type(error).__name__}: {error}") from error
    classes = {number: (synset, words) for number, synset, words in rows if number <= _CLASSES}
    synsets = {synset for synset, _ in classes.values()}
    if (
        not classes
        or sorted(classes) != list(range(1, len(classes) + 1))
        or len(synsets) < len(classes)
        or not all(re.fullmatch(r"n\d{8}", synset) for synset in synsets)
    ):
        raise UserError(f"{path}: is not ILSVRC 2012's: its classes are not synsets from number 1")
    return classes


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


def _index_train(path: Path, classes: _Classes) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(classes.synsets)}
    found: dict[str, list[_Member]] = {}
    with _open_tar(path) as outer:
        for member in tqdm(
            _files(outer, path), f"indexing {path.name}", len(numbers), unit="class", delay=2
        ):
            synset = PurePosixPath(member.name).stem
            if synset not in numbers:
                raise UserError(f"{path}: {member.name} is of no synset in {classes.file}")
            with _open_tar(path, outer.extractfile(member)) as inner:
                found[synset] = [
                    _Member(
                        printable(image.name),
                        numbers[synset],
                        member.offset_data + image.offset_data,
                        image.size,
                    )
                    for image in _files(inner, path)
                ]
    missing = [synset for synset in numbers if not found.get(synset)]
    if missing:
        raise UserError(f"{path}: has no image of {missing[0]}, which {classes.file} lists")
    return [image for synset in numbers for image in found[synset]]


def _index_validation(path: Path, classes: _Classes, answers: _Answers) -> list[_Member]:
    numbers = {synset: label for label, synset in enumerate(classes.synsets)}
    with _open_tar(path) as tar:
        images = sorted(_files(tar, path), key=lambda image: image.name)
    if len(images) != len(answers.synsets):
        raise UserError(
            f"{path} has {len(images)} images but {answers.file} {len(answers.synsets)} lines"
        )
    members = []
    for line, (image, synset) in enumerate(zip(images, answers.synsets), 1):
        if synset not in numbers:
            raise UserError(f"{answers.file}, line {line}: {synset!r} is not in {classes.file}")
        members.append(
            _Member(printable(image.name), numbers[synset], image.offset_data, image.size)
        )
    return members
