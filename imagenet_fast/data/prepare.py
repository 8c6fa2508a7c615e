"""Converts a source of labelled images into TFRecord shards and a manifest.

Which images go into which shard, and in which order, is settled before any work, so the shards are
the same bytes whatever the number of threads and however often the work was interrupted. A finished
shard is renamed into place and noted in a journal; a run that finds a journal goes on from there,
and the last thing that a run does is to replace the journal by the manifest.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Optional

from PIL import Image
from tqdm import tqdm

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.data import facts, prepare_plan, records
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.image_limit import ImageLimit
from imagenet_fast.data.images import (
    ENCODINGS,
    EXIF,
    BadImageError,
    SizeLimit,
    encode_pixels,
    normalize_encoding,
)
from imagenet_fast.data.manifest import Manifest, Shard, Skipped, Split
from imagenet_fast.data.prepare_journal import (
    JOURNAL,
    Done,
    Journal,
    check_same_job,
    read_job,
    unwritable,
)
from imagenet_fast.data.prepare_plan import Lists, Task
from imagenet_fast.data.sources import Item, Source

# By encoding; raised whenever the same source begins to give other shards.
_CONVERTER_VERSIONS = {"jpeg": 3, "png": 4}

_SPLITS = ("train", "validation", "test")
_BAD_IMAGES_SHOWN = 5
# Returns the index of an image file of a height and a width, as ``jpeg_index.index_file``.
_Indexer = Callable[[bytes, int, int], Optional[bytes]]
# What a job may differ in from the one that was begun, where its images may come and go.
_CHANGING = ("images", "fingerprint")


def default_shards(images: int) -> dict[str, int]:
    """Returns the usual numbers of shards for a data set of ``images`` training images.

    Powers of two, so that 2, 4, 8 ... workers get equally many files: for training as many as have
    1000 images each, but 8 to 1024; for validation and a test an eighth of that, but at least 4.
    ImageNet gets its customary 1024 and 128.
    """
    train = 8
    while train < 1024 and images >= 2 * train * 1000:
        train *= 2
    others = max(4, train // 8)
    return {"train": train, "validation": others, "test": others}


def prepare(
    source: Source,
    directory: str | os.PathLike[str],
    train_shards: int | None = None,
    validation_shards: int | None = None,
    seed: int = 0,
    encoding: str = "jpeg",
    max_side: int | None = None,
    shorter_side: int | None = None,
    exif: str = "ignore",
    jpeg_index: bool = True,
    threads: int | None = None,
    max_bad_images: int | float | str = 100,
    progress: bool = True,
) -> Manifest:
    """Writes the images of ``source`` as shards into ``directory``, or goes on doing so.

    Beside them are the manifest and what is known of each image, as ``facts`` has it.

    All splits are shuffled: training wants neighbours of different classes, and part of the
    validation set should be a fair sample of it; if there are no images of a split other than
    ``train``, there will be no such split. If the directory holds the finished data set, shards
    that are missing or have the wrong size are made again and nothing else is done.

    Args:
      source: The images.
      directory: Where to; made if need be.
      train_shards: Number of files; by default that of ``default_shards``.
      validation_shards: Likewise.
      seed: Of the shuffle.
      encoding: What images become that are resized or turned, or are no JPEGs that training can
        decode: ``jpeg``, of quality 95, or ``png``, which keeps each pixel. Other JPEGs stay as
        they are.
      max_side: Images whose longer side has more pixels are made smaller, to this many, and encoded
        anew; None: none are.
      shorter_side: Likewise by the shorter side; at most one of both.
      exif: What becomes of EXIF orientation: ``ignore`` keeps pixels as they are stored, ``apply``
        turns those of images that are not upright, which are encoded anew.
      jpeg_index: Index baseline JPEGs, from which training then decodes no more than the blocks
        around a crop. That takes a C++ compiler; without one, it is left out with a warning.
      threads: Number of shards that are written at the same time; by default that of cores.
      max_bad_images: How many images that cannot be decoded are left out, and listed in the
        manifest, before that is an error: a count, or a fraction of all, as 0.01 or ``"1%"``.
      progress: Show a progress bar.

    Returns:
      The manifest, as it was written into ``directory``.

    Raises:
      UserError: The directory cannot be written to, is in use by another process, or holds another
        data set or this one made in another way; there is no such encoding or limit; a number of
        shards or a side is impossible; an image cannot be read or has a label out of range; too
        many images cannot be decoded.
    """
    check_choices(encoding, exif)
    size_limit = _size_limit(max_side, shorter_side)
    bad_limit = ImageLimit.parse(str(max_bad_images), "max_bad_images")
    directory = target_directory(directory)
    settled = prepare_plan.read_lists(directory) if source.list_files() else None
    shards = _shard_counts(
        source, {"train": train_shards, "validation": validation_shards}, settled or {}
    )
    job = {
        **source.describe(),
        "shards": shards,
        "seed": seed,
        "encoding": encoding,
        **size_limit._asdict(),
        "exif": exif,
        "converter_version": _CONVERTER_VERSIONS[encoding],
    }
    made = _job_there(directory)
    indexer = _indexer(jpeg_index, made)
    if indexer or "jpeg_index" in made:
        job["jpeg_index"] = indexer is not None
    converter = _Converter(
        source,
        directory,
        encoding,
        size_limit,
        exif,
        indexer,
        threads or cpu_cores(),
        bad_limit,
        progress,
    )
    if (directory / manifests.FILE).exists():
        return _mend(converter, source, settled, job, directory)
    _check_no_strangers(directory)
    with Journal(directory, job, free=_CHANGING if settled else ()) as journal:
        there = {
            done.shard.file: done
            for done in journal.done
            if not manifests.size_problem(done.shard, directory / done.shard.file)
        }
        tasks, kept = _settle(source, settled, there, journal, job, directory)
        digests = {task.file: task.digest for task in tasks}
        intact = {file: done for file, done in there.items() if done.digest == digests[file]}

        def finish(done: Done) -> None:
            journal.add(done)
            intact[done.shard.file] = done

        todo = [task for task in tasks if task.file not in intact]
        converter.run(todo, list(intact.values()), finish)
        manifest = _summarize(source, job, [intact[task.file] for task in tasks])
        packed = {done.shard.file: done.facts for done in intact.values()}
        try:
            facts.write_facts(manifest, packed, directory)
            if not kept:
                prepare_plan.remove_lists(directory)
            manifests.write_manifest(manifest, directory)
        except OSError as error:
            raise unwritable(directory / manifests.FILE, error) from error
        journal.remove()
    return manifest


def _job_there(directory: Path) -> dict[str, Any]:
    """Returns the job that a directory was made by, or begun by, empty if there is none."""
    if (directory / manifests.FILE).exists():
        return manifests.read_manifest(directory).source
    return read_job(directory) or {}


def _indexer(asked: bool, made: dict[str, Any]) -> _Indexer | None:
    """Returns what indexes JPEGs; None if they are not to be: also if they are not so far.

    If they are so far, and cannot be here, it raises a UserError at the first one.
    """
    if not asked or (made and not made.get("jpeg_index")):
        return None
    from imagenet_fast.data.jpeg_index import index_file, load_jpeg_ops

    try:
        load_jpeg_ops()
    except OSError as error:
        message = f"jpeg_index: JPEGs cannot be indexed: {error}"

        def fail(*_: object) -> None:
            raise UserError(message)

        if made:
            return fail
        warn_once(f"jpeg_index: images will be read more slowly, without indexes: {error}")
        return None
    return index_file


def check_choices(encoding: str, exif: str) -> None:
    """Checks what ``prepare`` is asked to make of images.

    Raises:
      UserError: There is no such encoding, or no such choice for EXIF.
    """
    require_choice("encoding", encoding, ENCODINGS)
    require_choice("exif", exif, EXIF)


def _size_limit(max_side: int | None, shorter_side: int | None) -> SizeLimit:
    if max_side is not None and shorter_side is not None:
        raise UserError("max_side and shorter_side: give one of both")
    for name, value in {"max_side": max_side, "shorter_side": shorter_side}.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}, but must be at least 1")
    return SizeLimit(max_side, shorter_side)


def target_directory(directory: str | os.PathLike[str]) -> Path:
    """Returns where shards are to be written, which must be a disk: a journal is kept there.

    Raises:
      UserError: It is in a bucket.
    """
    advice = (
        "; copy it to the bucket from there, with `gcp/tpu copy_data` or `gcloud storage rsync "
        "--recursive`"
    )
    return to_local_path(directory, "data_dir", advice)


def _settle(
    source: Source,
    settled: Lists | None,
    there: dict[str, Done],
    journal: Journal,
    job: dict[str, Any],
    directory: Path,
) -> tuple[list[Task], bool]:
    """Returns the shards to be made, and whether later runs cannot tell them by the seed alone.

    Args:
      source: The images.
      settled: What an earlier run has settled.
      there: The shards that it has made, which may be of other images by now.
      journal: Of the job that was begun.
      job: The one asked for.
      directory: Where both are kept.

    Raises:
      UserError: The images are others, or what is settled cannot be written.
    """
    dealt = prepare_plan.deal(source.splits, job["shards"], job["seed"])
    files = source.list_files()
    if files is None:
        return prepare_plan.tasks_of(source, dealt), False
    usual = lists = prepare_plan.lists_of(files, dealt)
    if settled is not None:
        done = {
            file for file, own in there.items() if own.digest == prepare_plan.digest(settled[file])
        }
        followed = prepare_plan.follow(settled, files, done)
        if followed is None:
            check_same_job(journal.job, job, directory)
        else:
            lists = followed
    if lists != settled:
        try:
            prepare_plan.write_lists(directory, lists)
        except OSError as error:
            raise unwritable(directory / prepare_plan.FILE, error) from error
    return prepare_plan.tasks_of_lists(files, lists), lists != usual


def _mend(
    converter: _Converter,
    source: Source,
    settled: Lists | None,
    job: dict[str, Any],
    directory: Path,
) -> Manifest:
    """Makes the shards of a finished data set again that are not what its manifest says."""
    manifest = manifests.read_manifest(directory)
    check_same_job(manifest.source, {k: v for k, v in job.items() if k not in _CHANGING}, directory)
    if manifest.source.get("fingerprint") != job["fingerprint"]:
        then, now = _numbers(manifest.source["images"]), _numbers(job["images"])
        raise UserError(
            f"{directory}: is finished, but the images have changed since ({then} then, {now} "
            "now): train on it as it is, or prepare the images of now in another directory"
        )
    for there, asked in zip(manifest.labels, source.labels):
        if there != asked:
            raise UserError(
                f"{directory}: is finished, with the class {there!r}, which is {asked!r} now: "
                "train on it as it is, or prepare the images in another directory"
            )
    files = source.list_files()
    if settled is None or files is None:
        dealt = prepare_plan.deal(source.splits, job["shards"], job["seed"])
        tasks = prepare_plan.tasks_of(source, dealt)
    else:
        tasks = prepare_plan.tasks_of_lists(files, settled)
    shards = {shard.file: shard for split in manifest.splits.values() for shard in split.shards}
    damaged = [
        task for task in tasks if manifests.size_problem(shards[task.file], directory / task.file)
    ]

    def compare(done: Done) -> None:
        if done.shard != shards[done.shard.file]:
            (directory / done.shard.file).unlink()
            raise UserError(
                f"{directory / done.shard.file}: was made again and is not what it was: the images "
                "or Pillow have changed since; delete the directory and prepare it afresh"
            )

    if damaged:
        with Journal(directory, job) as journal:
            converter.run(damaged, [], compare)
            journal.remove()
    # Left behind by a run that was killed between writing the manifest and this. It does no harm
    # where nothing can be removed, as on a disk that is mounted read-only.
    if (directory / JOURNAL).exists():
        with contextlib.suppress(OSError):
            (directory / JOURNAL).unlink()
    return manifest


def _numbers(images: dict[str, int]) -> str:
    return ", ".join(f"{number} {split}" for split, number in images.items())


def _check_no_strangers(directory: Path) -> None:
    """Keeps shards that something else made from being replaced by ours of the same name."""
    if not directory.is_dir() or (directory / JOURNAL).exists():
        return
    for split in _SPLITS:
        for path in directory.glob(f"{split}-*-of-*"):
            raise UserError(
                f"{directory}: holds {path.name}, which neither a manifest nor a journal tells of; "
                "choose another directory"
            )


# --- The shards -----------------------------------------------------------------------------------


def _shard_counts(
    source: Source, asked: dict[str, int | None], settled: Collection[str]
) -> dict[str, int]:
    """Returns the number of shards of each split: by default those that are settled already."""
    usual = default_shards(source.splits["train"])
    usual |= collections.Counter(map(prepare_plan.split_of, settled))
    counts = {}
    for split in _SPLITS:
        images = source.splits.get(split, 0)
        if not images and split != "train" and asked.get(split) is None:
            continue
        if not images:
            raise UserError(f"{source.name}: has no {split} images")
        number = asked.get(split)
        if number is None:
            counts[split] = usual[split] if settled else min(usual[split], images)
            continue
        counts[split] = number
        if not 0 < counts[split] <= images:
            raise UserError(
                f"{split} shards must be between 1 and the number of images, {images}, "
                f"not {counts[split]}"
            )
    return counts


# --- The work -----------------------------------------------------------------------------------


class _Converter:
    """Makes shards, several at a time in threads: reading and codecs leave Python's lock alone."""

    def __init__(
        self,
        source: Source,
        directory: Path,
        encoding: str,
        size_limit: SizeLimit,
        exif: str,
        indexer: _Indexer | None,
        threads: int,
        bad_limit: ImageLimit,
        progress: bool,
    ) -> None:
        self._source = source
        self._directory = directory
        self._encoding = encoding
        self._size_limit = size_limit
        self._exif = exif
        self._indexer = indexer
        self._threads = threads
        self._bad_limit = bad_limit
        self._images = sum(source.splits.values())
        self._progress = progress
        self._lock = threading.Lock()  # held to skip an image, move the bar or finish a shard
        self._skipped: list[Skipped] = []
        self._stopped = False

    def run(self, tasks: list[Task], done: list[Done], finish: Callable[[Done], None]) -> None:
        """Makes the shards of ``tasks``.

        Args:
          tasks: What to do.
          done: What was done in earlier runs, for the progress bar and the limit on bad images.
          finish: Called with each shard as soon as it lies under its final name, one at a time.
        """
        self._skipped += [skipped for shard in done for skipped in shard.skipped]
        self._check_skipped()
        import tensorflow  # noqa: F401  (seconds, which are not to count as the first image's)

        before = sum(shard.images for shard in done)
        self._bar = tqdm(
            desc=self._source.name,
            total=before + sum(len(task.places) for task in tasks),
            initial=before,
            unit=" images",
            disable=not self._progress,
        )
        pool = ThreadPoolExecutor(self._threads)
        with self._bar, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # of metadata that nobody reads
            try:
                futures = [pool.submit(self._make, task, finish) for task in tasks]
                for future in as_completed(futures):
                    future.result()
            finally:
                self._stopped = True  # an error or Ctrl-C needn't wait for whole shards
                pool.shutdown(cancel_futures=True)

    def _make(self, task: Task, finish: Callable[[Done], None]) -> None:
        """Makes one shard, in a thread of the pool."""
        path = self._directory / task.file
        counts = [0] * len(self._source.labels)
        converted: collections.Counter[str] = collections.Counter()
        skipped: list[Skipped] = []
        rows: list[tuple] = []
        unindexed = 0
        splits = list(self._source.splits)

        def examples() -> Iterator[bytes]:
            nonlocal unindexed
            for number, index in task.places.tolist():
                if self._stopped:
                    raise CancelledError
                item = self._read(splits[number], index)
                try:
                    record, lacks_index = self._convert(item, converted, rows)
                    yield record
                    unindexed += lacks_index
                    counts[item.label] += 1
                except BadImageError as error:
                    skipped.append(self._skip(task.split, item, error))
                with self._lock:
                    self._bar.update()

        try:
            written = records.write_records(path, examples())
            shard = Shard(task.file, written.examples, written.bytes, written.sha256)
            with self._lock:
                finish(
                    Done(
                        task.split,
                        shard,
                        counts,
                        dict(converted),
                        skipped,
                        task.digest,
                        facts.pack(rows),
                        unindexed,
                    )
                )
        except OSError as error:
            raise unwritable(path, error) from error

    def _read(self, split: str, index: int) -> Item:
        try:
            item = self._source.read(split, index)
        except OSError as error:
            raise UserError(f"{self._source.name}: cannot be read: {error}") from error
        if not 0 <= item.label < len(self._source.labels):
            raise UserError(
                f"{self._source.name}: {item.filename} in {split} has the label {item.label}, "
                f"outside 0..{len(self._source.labels) - 1}"
            )
        return item

    def _convert(
        self, item: Item, converted: collections.Counter[str], rows: list[tuple]
    ) -> tuple[bytes, bool]:
        """Returns a record, and whether its image should have an index and cannot have one."""
        seen: list[Image.Image] = []
        if isinstance(item.image, bytes):
            image = normalize_encoding(
                item.image,
                self._encoding,
                size_limit=self._size_limit,
                exif=self._exif,
                seen=seen.append,
            )
        else:
            image = encode_pixels(item.image, self._encoding, self._size_limit, seen.append)
        if image.converted_from:
            converted[image.converted_from] += 1
        index = self._indexer(image.data, image.height, image.width) if self._indexer else None
        synsets = self._source.synsets
        record = encode_example(
            image.data,
            label=item.label,
            text=self._source.labels[item.label],
            synset=synsets[item.label] if synsets else None,
            filename=item.filename,
            height=image.height,
            width=image.width,
            channels=image.channels,
            jpeg_index=index or b"",
        )
        rows.append(facts.describe(image, seen[0], item.label, len(record)))
        return record, index == b""

    def _skip(self, split: str, item: Item, error: BadImageError) -> Skipped:
        skipped = Skipped(split, item.filename, str(error))
        with self._lock:
            self._skipped.append(skipped)
        self._check_skipped()
        return skipped

    def _check_skipped(self) -> None:
        most = self._bad_limit.images(self._images)
        if len(self._skipped) <= most:
            return
        examples = "; ".join(
            f"{skipped.file}: {skipped.reason}" for skipped in self._skipped[:_BAD_IMAGES_SHOWN]
        )
        of = "" if self._bad_limit.count is not None else f"={self._bad_limit} of {self._images}"
        raise UserError(
            f"{self._source.name}: more than {most} images (max_bad_images{of}) cannot be used, "
            f"such as {examples}"
        )


def _summarize(source: Source, job: dict[str, Any], done: list[Done]) -> Manifest:
    splits = {}
    converted: collections.Counter[str] = collections.Counter()
    for split in job["shards"]:
        members = [shard for shard in done if shard.split == split]
        splits[split] = Split(
            shards=tuple(member.shard for member in members),
            class_counts=tuple(map(sum, zip(*(member.class_counts for member in members)))),
        )
    for shard in done:
        converted.update(shard.converted)
    if not splits["train"].examples:
        raise UserError(f"{source.name}: none of its training images can be used")
    absent = [
        _no_training_image(label, {name: own.class_counts[number] for name, own in splits.items()})
        for number, label in enumerate(source.labels)
        if not splits["train"].class_counts[number]
    ]
    if "validation" in splits and not splits["validation"].examples:
        absent.append("none of the validation images can be used, by which to measure accuracy")
    return Manifest(
        name=source.name,
        labels=source.labels,
        splits=splits,
        source=job,
        converted=dict(sorted(converted.items())),
        skipped=tuple(skipped for shard in done for skipped in shard.skipped),
        unindexed=sum(shard.unindexed for shard in done),
        warnings=(*source.warnings, *absent),
    )


def _no_training_image(label: str, counts: dict[str, int]) -> str:
    others = " and ".join(
        f"{count} for {'a test' if split == 'test' else split}"
        for split, count in counts.items()
        if count
    )
    return f"class {label!r} has no training image{', but ' * bool(others)}{others}"
