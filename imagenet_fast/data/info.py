"""A data set's classes, splits and shards, from its manifest or from the shards alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data.examples import LABEL, decode_example
from imagenet_fast.data.manifest import JOURNAL
from imagenet_fast.data.options import SourceOptions
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.records import CorruptRecordError, index_shard, read_records

_SHARD_NAME = re.compile(r"(train|validation|test)-\d{5}-of-\d{5}")
# Labels checked in each of three shards of a directory without a manifest.
_LABELS_CHECKED = 1000
_SYNTHETIC_EXAMPLES = 1_281_167  # as ImageNet, so epochs are equally long


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """The shards of a split.

    Attributes:
      paths: the TFRecord files; none for synthetic data.
      counts: number of records in each file.
      bytes: total size of the files.
      examples: total number of records.
      checksum: of the content of all files; empty without a manifest.
      class_counts: number of records of each class; empty without a manifest.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    bytes: int
    examples: int
    checksum: str = ""
    class_counts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A data set, as described by its manifest or found without one.

    Attributes:
      name: for display.
      labels: class names.
      label_offset: added to a stored label to get a class in [0, num_classes).
      splits: ``train`` and, if there are any, ``validation`` and ``test``.
      preparation: what ``prepare`` did to the images; None: unknown, of another converter's shards.
      multi_label: whether an image has any number of labels, also none.
    """

    name: str
    labels: tuple[str, ...]
    label_offset: int
    splits: dict[str, SplitInfo]
    preparation: Preparation | None = None
    multi_label: bool = False

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a label in a batch, which is a class number, or 0 or 1 for each class."""
        return (self.num_classes,) if self.multi_label else ()


def numbered_labels(num_classes: int) -> tuple[str, ...]:
    """Returns numbers as names of unnamed classes."""
    return tuple(str(label) for label in range(num_classes))


def read_info(options: SourceOptions) -> DatasetInfo:
    """Returns the data set of ``options``, after checking it without reading all of it.

    Raises:
      UserError: if there is no data, a shard is missing, empty or truncated, or the number of
        classes or the labels contradict the options.
    """
    if options.synthetic:
        train = SplitInfo((), (), 0, _SYNTHETIC_EXAMPLES)
        return DatasetInfo("synthetic", numbered_labels(options.num_classes), 0, {"train": train})
    if not options.data_dir:
        raise UserError("no data: give --data_dir (made by `imagenet-fast prepare`) or --synthetic")
    directory = to_path(options.data_dir)
    if not directory.exists():
        raise UserError(
            f"data_dir {directory} does not exist; make it with `imagenet-fast prepare`"
        )
    if not directory.is_dir():
        raise UserError(f"data_dir {directory} is not a directory")
    if (directory / manifests.FILE).exists():
        return _from_manifest(directory, options)
    return _from_shards(directory, options)


def _from_manifest(directory: Path, options: SourceOptions) -> DatasetInfo:
    manifest = manifests.read_manifest(directory)
    if options.num_classes not in (0, manifest.num_classes):
        raise UserError(
            f"num_classes is {options.num_classes}, but {directory / manifests.FILE} "
            f"names {manifest.num_classes} classes"
        )
    if options.label_offset:
        raise UserError(
            f"label_offset is for shards without a manifest, but {directory} has one: remove it"
        )
    splits = {}
    for name, split in manifest.splits.items():
        manifests.check_sizes(manifest, directory, name)
        if not split.examples:  # all of its images were skipped
            continue
        splits[name] = SplitInfo(
            paths=tuple(str(directory / shard.file) for shard in split.shards),
            counts=tuple(shard.examples for shard in split.shards),
            bytes=sum(shard.bytes for shard in split.shards),
            examples=split.examples,
            checksum=manifests.digest_of(split.shards),
            class_counts=split.class_counts,
        )
    if "train" not in splits:
        raise UserError(f"{directory} has no training images")
    return DatasetInfo(
        manifest.name,
        manifest.labels,
        manifest.label_offset,
        splits,
        manifest.preparation,
        manifest.multi_label,
    )


def _from_shards(directory: Path, options: SourceOptions) -> DatasetInfo:
    """Describes shards that another converter wrote."""
    if (directory / JOURNAL).exists():
        raise UserError(
            f"{directory} is not finished: rerun the `imagenet-fast prepare` command that makes it"
        )
    entries: list[Path] = list(directory.iterdir())
    paths = [path for path in sorted(entries, key=str) if _SHARD_NAME.fullmatch(path.name)]
    if not any(path.name.startswith("train") for path in paths):
        raise UserError(
            f"{directory} has neither {manifests.FILE} nor shards named "
            "train-00000-of-01024; make them with `imagenet-fast prepare`"
        )
    if not options.num_classes:
        raise UserError(
            f"{directory} has no {manifests.FILE}: give the number of classes, e.g. "
            "--num_classes=1000, and --label_offset=-1 if labels start at 1"
        )
    stats = [path.stat() for path in paths]
    shards = tuple((path, stat.st_size, stat.st_mtime) for path, stat in zip(paths, stats))
    labels = numbered_labels(options.num_classes)
    splits, multi_label = _count_records(shards, options.num_classes, options.label_offset)
    return DatasetInfo(
        directory.name, labels, options.label_offset, dict(splits), multi_label=multi_label
    )


@functools.lru_cache(maxsize=2)
def _count_records(
    shards: tuple[tuple[Path, int, float], ...], num_classes: int, label_offset: int
) -> tuple[dict[str, SplitInfo], bool]:
    """Counts records by their length headers, and checks some labels.

    This reads much of the shards, so the result is cached until they change.

    Args:
      shards: path, size in bytes and modification time of each shard.
      num_classes: of the data set.
      label_offset: added to a label to get a class.

    Returns:
      The splits, and whether one of those records has several labels.
    """
    found: dict[str, list[Path]] = {}
    for path, _, _ in shards:
        found.setdefault(path.name.partition("-")[0], []).append(path)
    sizes = {path: size for path, size, _ in shards}
    splits, multi_label = {}, False
    for name, paths in found.items():
        check_complete(name, paths)
        counts = tuple(index_shard(path) for path in paths)
        for path, count in zip(paths, counts):
            if not count:
                raise UserError(f"{path} is empty: remove or rewrite it")
        multi_label |= _check_labels(paths, num_classes, label_offset)
        splits[name] = SplitInfo(
            paths=tuple(map(str, paths)),
            counts=counts,
            bytes=sum(sizes[path] for path in paths),
            examples=sum(counts),
        )
    return splits, multi_label


def check_complete(split: str, paths: Sequence[Path]) -> None:
    """Checks that no shard is missing, by the total in the first shard's name.

    Args:
      split: ``train``, ``validation`` or ``test``.
      paths: the split's shards, sorted; at least one.

    Raises:
      UserError: if a shard is missing or belongs to another set.
    """
    directory, first = paths[0].parent, paths[0].name
    total = first.rpartition("-")[2]
    expected = {f"{split}-{number:05d}-of-{total}" for number in range(int(total))}
    names = {path.name for path in paths}
    if names - expected:
        raise UserError(
            f"{directory / min(names - expected)} and {first} belong to different sets: keep the "
            "shards of one set"
        )
    missing = sorted(expected - names)
    if missing:
        more = f" ({len(missing) - 1} more like it)" if len(missing) > 1 else ""
        raise UserError(f"{directory / missing[0]} is missing{more}")


def _check_labels(paths: list[Path], num_classes: int, label_offset: int) -> bool:
    """Checks some labels of the first, the middle and the last shard.

    Returns:
      Whether a record has several.
    """
    several = False
    for path in dict.fromkeys((paths[0], paths[len(paths) // 2], paths[-1])):
        records = itertools.islice(read_records(path), _LABELS_CHECKED)
        try:
            for number, record in enumerate(records):
                place = f"{path}, record {number}"
                several |= _check_label(place, record, num_classes, label_offset) > 1
        except CorruptRecordError:
            continue  # the input pipeline skips and counts it
    return several


def _check_label(place: str, record: bytes, num_classes: int, label_offset: int) -> int:
    """Checks the labels of a record, and returns their number."""
    try:
        values = decode_example(record).get(LABEL)
    except ValueError as error:
        raise UserError(f"{place} is {error}") from None
    if not values or not isinstance(values[0], int):
        raise UserError(f"{place} has no integer {LABEL}")
    for value in values:
        label = value + label_offset
        if not 0 <= label < num_classes:
            raise UserError(
                f"{place} has label {value}, which with label_offset {label_offset} is {label}: "
                f"not in [0, {num_classes}). In shards of the TPU and Model Garden converters, "
                "labels start at 1: --label_offset=-1 --num_classes=1000"
            )
    return len(values)
