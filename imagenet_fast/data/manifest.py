"""The manifest of a prepared data set: its classes and shards, with their sizes and checksums.

``manifest.json`` is beside the shards. Training reads the number of classes and examples from it
and checks the shards' sizes before it starts; ``verify`` checks everything.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import msgspec
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import Count, as_type, read_json
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.data import records
from imagenet_fast.data.examples import decode_example, labels_of
from imagenet_fast.data.preparation import Preparation

FILE = "manifest.json"
# Of `prepare`: where it is, the shards are not all there.
JOURNAL = "prepare.journal"
VERSION = 1
# Of shards by `prepare --add_index` until they replace those without.
INDEXED_SUFFIX = ".indexed"

_FILES_AT_ONCE = 16
SPLITS = ("train", "validation", "test")
# A file of the folder itself, not hidden; and a class that fits on a line of a text file.
_FILE_NAME = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff*?\[]{1,255}")
_NOT_IN_LINES = re.compile("[\n\r\0\ud800-\udfff]")
_Offset = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One TFRecord file.

    Attributes:
      file: its name in the data set's directory.
      examples: number of records.
      bytes: its size.
      sha256: hex SHA-256 of its content.
    """

    file: str
    examples: Count
    bytes: Count
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """The training, validation or test images.

    Attributes:
      shards: in the order of their numbers.
      class_counts: number of examples of each class.
    """

    shards: tuple[Shard, ...]
    class_counts: tuple[Count, ...]

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(shard.examples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An image that was skipped.

    Attributes:
      split: ``train``, ``validation`` or ``test``.
      file: its name in the source.
      reason: why it could not be used.
    """

    split: str
    file: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data set.

    Attributes:
      name: the data set, e.g. ``fashion_mnist``.
      labels: class names.
      splits: by name: ``train`` and, if there are any, ``validation`` and ``test``.
      label_offset: added to a record's label to get its class, an index of ``labels``: 0 in shards
        by ``prepare``, -1 where labels start at 1.
      source: the source and the options of ``prepare``, as JSON values; equal ones give equal
        shards.
      converted: number of re-encoded images, by their original format.
      skipped: the images that were skipped.
      unindexed: number of JPEGs without an index that are large enough for one, such as progressive
        ones.
      warnings: problems of the source that did not stop ``prepare``.
      multi_label: whether an image has any number of labels; class counts are then of labels.
    """

    name: str
    labels: tuple[str, ...]
    splits: dict[str, Split]
    label_offset: _Offset = 0
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    converted: dict[str, Count] = dataclasses.field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    unindexed: Count = 0
    warnings: tuple[str, ...] = ()
    multi_label: bool = False

    @property
    def preparation(self) -> Preparation | None:
        """What was done to the images, or None if that is unknown."""
        return Preparation.of(self.source) if self.source else None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Returns the manifest of the data set in ``directory``.

    Raises:
      UserError: there is no such directory, it has no manifest, or this version of the package
        cannot read the manifest.
    """
    directory = to_path(directory)
    path = directory / FILE
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such directory; make the data set with `imagenet-fast prepare`"
        )
    try:
        values = read_json(path, dict[str, Any])
    except FileNotFoundError as error:
        raise UserError(
            f"{directory}: has no {FILE}; make the data set with `imagenet-fast prepare`, or rerun "
            "that if it was interrupted"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    version = values.get("version")
    if not isinstance(version, int):
        raise UserError(f"{path}: is not a manifest by imagenet_fast")
    if version > VERSION:
        raise UserError(
            f"{path}: has version {version}, but this imagenet_fast reads only up to {VERSION}: "
            "update imagenet_fast"
        )
    try:
        manifest = as_type(values, Manifest)
        _check(manifest)
    except ValueError as error:
        raise UserError(f"{path}: is not a valid manifest: {error}") from error
    return manifest


def write_manifest(manifest: Manifest, directory: str | os.PathLike[str]) -> None:
    """Writes ``manifest`` into ``directory`` atomically, replacing an older one."""
    values = {"version": VERSION, **dataclasses.asdict(manifest)}
    write_file(to_path(directory, FILE), json.dumps(values, indent=1) + "\n")


def check_sizes(manifest: Manifest, directory: str | os.PathLike[str], split: str) -> None:
    """Checks that each shard of ``split`` exists and has the right size, without reading it.

    Raises:
      UserError: there is no such split, or a shard is missing, empty, truncated or too long.
    """
    if split not in manifest.splits:
        raise UserError(
            f"{directory}: no split {split!r}; it has {', '.join(manifest.splits)}"
            f"{nearest(split, manifest.splits)}"
        )
    directory = to_path(directory)
    problems = _size_problems(manifest.splits[split].shards, directory)
    if problems:
        # `prepare --add_index` may have replaced shards since the manifest was read.
        current = {shard.file: shard for shard in read_manifest(directory).shards}
        shards = [current.get(shard.file, shard) for shard in problems]
        problems = _size_problems(shards, directory)
    if problems:
        first = next(iter(problems.values()))
        more = f" ({len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise UserError(
            f"{first}{more}; rerun the `imagenet-fast prepare` command that made {directory} "
            "to repair it, or list all problems with --verify"
        )


def verify(directory: str | os.PathLike[str], progress: bool = True) -> list[str]:
    """Checks every byte of the data set in ``directory`` against its manifest.

    This compares sizes, SHA-256, TFRecord checksums, number of records, labels and class counts.

    Args:
      directory: the data set.
      progress: whether to show a progress bar, in bytes.

    Returns:
      One line per problem, which names the shard and the damaged record, if any.

    Raises:
      UserError: the manifest itself cannot be read.
    """
    directory = to_path(directory)
    manifest = read_manifest(directory)
    problems = []
    read = functools.partial(_read_shard, multi_label=manifest.multi_label)
    total = sum(shard.bytes for shard in manifest.shards)
    pool = ThreadPoolExecutor(cpu_cores())
    try:
        with tqdm(
            total=total, desc="verify", unit="B", unit_scale=True, disable=not progress
        ) as bar:
            for name, split in manifest.splits.items():
                counts: collections.Counter[int] = collections.Counter()
                paths = [directory / shard.file for shard in split.shards]
                for shard, found in zip(split.shards, pool.map(read, split.shards, paths)):
                    problems += found.problems
                    counts += found.labels
                    bar.update(shard.bytes)
                problems += _count_problems(manifest, name, counts)
    finally:
        pool.shutdown(cancel_futures=True)
    return problems


class _Contents(NamedTuple):
    """A shard's problems, and its number of records by label."""

    problems: list[str]
    labels: collections.Counter[int]


def _read_shard(shard: Shard, path: Path, *, multi_label: bool) -> _Contents:
    labels: collections.Counter[int] = collections.Counter()
    problems = []
    problem = size_problem(shard, path)
    if problem:
        problems.append(problem)
        if not _exists(path):
            return _Contents(problems, labels)
    elif _awaits_index(shard, path):
        problems.append(
            f"{path}: lacks indexes: rerun `imagenet-fast prepare --add_index`, which was "
            "interrupted"
        )
    elif sha256(path) != shard.sha256:
        problems.append(
            f"{path}: its SHA-256 differs from the manifest's: delete it and rerun `imagenet-fast "
            "prepare`"
        )
    number = 0
    for number, record in enumerate(_read_records(path, shard.examples), 1):
        lost = records.lost_record(record)
        if lost:
            problems.append(
                f"{path}: record {lost.record}, at byte {lost.offset}, is corrupt: {lost.reason}"
            )
            continue
        try:
            labels.update(labels_of(decode_example(record), multi_label=multi_label))
        except ValueError as error:
            problems.append(f"{path}: record {number - 1}: {error}")
    if number != shard.examples:
        problems.append(
            f"{path}: has {counted(number, 'record')}, but {shard.examples} in the manifest"
        )
    return _Contents(problems, labels)


def _exists(path: Path) -> bool:
    with contextlib.suppress(OSError):  # e.g. without permission for the directory
        return path.is_file()
    return False


def _read_records(path: Path, count: int) -> Iterator[bytes]:
    """Yields all records, or, if one is damaged, ``count`` records with notes for lost ones."""
    read = 0
    try:
        for record in records.read_records(path):
            yield record
            read += 1
    except records.CorruptRecordError:
        # Undamaged data needs no TensorFlow.
        from imagenet_fast.data.shards import shard_reader

        read_shard = shard_reader([str(path)])
        yield from read_shard(str(path), count, 0).skip(read).as_numpy_iterator()


def _count_problems(manifest: Manifest, name: str, counts: collections.Counter[int]) -> list[str]:
    """Compares the numbers of readable records by label with the manifest's class counts."""
    problems = []
    expected = {
        index - manifest.label_offset: (manifest.labels[index], count)
        for index, count in enumerate(manifest.splits[name].class_counts)
    }
    for label in sorted(expected.keys() | counts.keys()):
        if label not in expected:
            problems.append(
                f"{name}: label {label} of {counted(counts[label], 'record')} is outside "
                f"{min(expected)}..{max(expected)}"
            )
        elif counts[label] != expected[label][1]:
            problems.append(
                f"{name}: class {expected[label][0]!r} has "
                f"{counted(counts[label], 'readable record')}, but {expected[label][1]} in the "
                "manifest"
            )
    return problems


def size_problem(shard: Shard, path: Path) -> str | None:
    """Returns what is wrong with the size of ``shard``'s file ``path``, or None."""
    try:
        found = path.stat()
        size = found.st_size
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path}: is not a regular file"
    if size == shard.bytes or _awaits_index(shard, path):
        return None
    state = "is empty" if not size else "is truncated" if size < shard.bytes else "is too long"
    return f"{path}: {state}: has {size} bytes, not {shard.bytes}"


def _awaits_index(shard: Shard, path: Path) -> bool:
    """Returns whether a shard is to be replaced by one with the same images and their indexes.

    ``prepare --add_index`` writes that one beside it, then the manifest, and then renames it.
    """
    try:
        indexed = path.with_name(path.name + INDEXED_SUFFIX)
        return indexed.stat().st_size == shard.bytes != path.stat().st_size
    except OSError:
        return False


def _size_problems(shards: Iterable[Shard], directory: Path) -> dict[Shard, str]:
    # In parallel, because each request to a bucket takes time.
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        shards = list(shards)
        paths = [directory / shard.file for shard in shards]
        problems = zip(shards, pool.map(size_problem, shards, paths))
        return {shard: problem for shard, problem in problems if problem}


def digest_of(shards: Iterable[Shard]) -> str:
    """Returns a hex SHA-256 of the content of all shards."""
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Returns the hex SHA-256 of a file.

    Raises:
      OSError: if it cannot be read, or is no regular file: a pipe could block.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check(manifest: Manifest) -> None:
    _ = manifest.preparation
    for label in manifest.labels:
        if _NOT_IN_LINES.search(label):
            raise ValueError(f"the class {label!r} does not fit on a line of text")
    for name, split in manifest.splits.items():
        if name not in SPLITS:
            raise ValueError(f"there is no split {name!r}, only {', '.join(SPLITS)}")
        for shard in split.shards:
            if not _FILE_NAME.fullmatch(shard.file):
                raise ValueError(f"{name}: {shard.file!r} is not the name of a file")
            if shard.examples * records.OVERHEAD > shard.bytes:
                raise ValueError(
                    f"{name}: {shard.file} has {shard.bytes} bytes, too few for {shard.examples} "
                    "records"
                )
        if len(split.class_counts) != manifest.num_classes:
            raise ValueError(
                f"{name}: has {len(split.class_counts)} class counts, but {manifest.num_classes} "
                "labels"
            )
        if not manifest.multi_label and sum(split.class_counts) != split.examples:
            raise ValueError(
                f"{name}: {sum(split.class_counts)} examples by class, {split.examples} by shard"
            )
    files = [shard.file for shard in manifest.shards]
    if len(set(files)) < len(files):
        raise ValueError("it names a shard twice")
