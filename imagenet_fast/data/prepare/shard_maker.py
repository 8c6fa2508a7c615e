"""Conversion of some of a source's images to a shard, in any process on any machine."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import Path
from imagenet_fast.data import metadata, records
from imagenet_fast.data.examples import classes_of, encode_example
from imagenet_fast.data.images import ONE_AT_A_TIME, BadImageError, EncodedImage
from imagenet_fast.data.manifest import Shard, Skipped
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.prepare.baseline_jpegs import find_jpegtran, is_progressive, to_baseline
from imagenet_fast.data.prepare.journal import Done, writing
from imagenet_fast.data.prepare.plan import Task
from imagenet_fast.data.prepare.sources import Item, Source

_LARGE_FILE = 2**26  # conversion and writing take four times its size
# Called after each image, with what is skipped, or None.
Tell = Callable[[Optional[Skipped]], None]


class ShardMaker:
    """Makes the shards of a job, as in the manifest's ``source``, in a directory.

    A shard's bytes are a function of the job.

    Raises:
      UserError: ``jpegtran`` is needed but not installed.
    """

    def __init__(self, source: Source, directory: Path, job: dict[str, Any]) -> None:
        self.source = source
        self.directory = directory
        self.job = job
        self._row = metadata.row_type(len(source.labels), source.multi_label)
        self._preparation = Preparation.of(job)
        self._jpegtran = find_jpegtran() if job.get("make_baseline") else None

    def make(
        self, task: Task, tell: Tell, one_at_a_time: AbstractContextManager[Any] = ONE_AT_A_TIME
    ) -> Done:
        """Writes one shard, under a temporary name until it is complete.

        What ``tell`` raises ends it. ``one_at_a_time`` is held while an image takes much memory; by
        default by this process' threads.

        Raises:
          UserError: the source cannot be read or has a label out of range, or the shard cannot be
            written.
        """
        path = self.directory / task.file
        counts = [0] * len(self.source.labels)
        converted: collections.Counter[str] = collections.Counter()
        skipped: list[Skipped] = []
        rows: list[tuple] = []
        unindexed = 0
        splits = list(self.source.splits)

        def examples() -> Iterator[bytes]:
            nonlocal unindexed
            for number, index in task.places.tolist():
                item = self._read(splits[number], index)
                bad = None
                large = isinstance(item.image, bytes) and len(item.image) > _LARGE_FILE
                try:
                    with one_at_a_time if large else nullcontext():
                        record, lacks_index = self._convert(item, converted, rows, one_at_a_time)
                        yield record
                        del record
                    unindexed += lacks_index
                    for label in classes_of(item.label):
                        counts[label] += 1
                except BadImageError as error:
                    bad = Skipped(task.split, item.filename, str(error))
                    skipped.append(bad)
                del item  # which would take memory beside the next one
                tell(bad)

        with writing(path):
            shard = Shard(task.file, *records.write_records(path, examples()))
        packed = metadata.pack(rows, self._row)
        return Done(
            task.split, shard, counts, dict(converted), skipped, task.digest, packed, unindexed
        )

    def _read(self, split: str, index: int) -> Item:
        try:
            item = self.source.read(split, index)
        except OSError as error:
            raise UserError(f"{self.source.name}: cannot be read: {error}") from error
        for label in classes_of(item.label):
            if not 0 <= label < len(self.source.labels):
                raise UserError(
                    f"{self.source.name}: {item.filename} in {split} has the label {label}, "
                    f"outside 0..{len(self.source.labels) - 1}"
                )
        return item

    def _convert(
        self,
        item: Item,
        converted: collections.Counter[str],
        rows: list[tuple],
        one_at_a_time: AbstractContextManager[Any],
    ) -> tuple[bytes, bool]:
        """Returns a record, and whether its JPEG lacks an index it should have."""
        if isinstance(item.image, BadImageError):
            raise item.image
        image = self._preparation.encoded(item.image, one_at_a_time)
        if self._jpegtran and is_progressive(image):
            image = to_baseline(image, self._jpegtran)
        if image.converted_from:
            converted[image.converted_from] += 1
        index = self._index(image) if self.job.get("jpeg_index") else None
        synsets, classes = self.source.synsets, classes_of(item.label)
        record = encode_example(
            image.data,
            label=item.label,
            text=tuple(self.source.labels[label] for label in classes),
            synset=synsets[classes[0]] if synsets else None,
            filename=item.filename,
            height=image.height,
            width=image.width,
            channels=image.channels,
            jpeg_index=index or b"",
        )
        rows.append(metadata.describe(image, item.label, len(record), self._row))
        return record, index == b""

    def _index(self, image: EncodedImage) -> bytes | None:
        from imagenet_fast.data.jpeg.index import index_file

        try:
            return index_file(image.data, image.height, image.width)
        except OSError as error:
            raise UserError(f"jpeg_index: JPEGs cannot be indexed: {error}") from error
