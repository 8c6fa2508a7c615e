"""The images of a prepared data set that are there twice: who they are, and which matter most."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np

from imagenet_fast.base.paths import Path
from imagenet_fast.data import records
from imagenet_fast.data.duplicates import Pairs, equal_files, look_alike
from imagenet_fast.data.examples import ENCODED, FILENAME, decode_example
from imagenet_fast.data.manifest import Manifest

FILE = "duplicates.jsonl"

_MOST_LINES = 10_000


class Image(NamedTuple):
    """An image as it lies in its shard.

    Attributes:
      split: ``train``, ``validation`` or ``test``.
      label: Its class' name.
      file: Its name in the source.
      shard: The name of the shard.
      record: Its number there.
      data: The image file.
    """

    split: str
    label: str
    file: str
    shard: str
    record: int
    data: bytes


class Images:
    """The images of a prepared data set, by their place in ``rows``.

    Args:
      manifest: Of the data set.
      rows: What is known of each image, of dtype ``facts.ROW`` and shape (images,).
      directory: Of the shards.

    Attributes:
      manifest: As given.
      rows: As given.
      splits: The index of each image's split in the manifest, int64 of shape (images,).
    """

    def __init__(self, manifest: Manifest, rows: np.ndarray, directory: Path) -> None:
        self.manifest = manifest
        self.rows = rows
        self._directory = directory
        sizes = [split.examples for split in manifest.splits.values()]
        self.splits = np.repeat(np.arange(len(sizes)), sizes)
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        self._shards = [shard.file for shard in shards]
        self._starts = np.cumsum([0, *(shard.examples for shard in shards)])

    def read(self, place: int) -> Image:
        """Returns an image.

        Raises:
          UserError: Its record cannot be read.
        """
        shard = int(np.searchsorted(self._starts, place, side="right")) - 1
        start = int(self._starts[shard])
        before = self.rows["record_bytes"][start:place].astype(np.int64) + records.OVERHEAD
        path = self._directory / self._shards[shard]
        record = records.read_record(path, place - start, int(before.sum()))
        fields = decode_example(record)
        name = fields.get(FILENAME) or [b""]
        return Image(
            split=list(self.manifest.splits)[self.splits[place]],
            label=self.manifest.labels[self.rows["label"][place]],
            file=name[0].decode(errors="replace"),
            shard=self._shards[shard],
            record=place - start,
            data=fields[ENCODED][0],
        )


@dataclasses.dataclass(frozen=True)
class Copies:
    """Pairs of images, those that do most harm first: in two classes, then in two splits.

    Attributes:
      pairs: The pairs.
      two_classes: Whether the images of each have different labels, bool of shape (pairs,).
      two_splits: Whether they are in different splits, likewise.
    """

    pairs: Pairs
    two_classes: np.ndarray
    two_splits: np.ndarray

    def __len__(self) -> int:
        return len(self.pairs.first)

    def number(self) -> str:
        """Returns how many there are, for people."""
        return f"{len(self):,}" if self.pairs.complete else f"at least {len(self):,}"

    def told(self, what: str) -> str:
        """Returns how many there are, and of them, of those that do harm."""
        of = [
            f"{count:,} of them in two {kind}"
            for kind, count in (
                ("classes", self.two_classes.sum()),
                ("splits", self.two_splits.sum()),
            )
            if count
        ]
        return ", ".join([f"{self.number()} {what}", *of])


class Found(NamedTuple):
    """The copies in a data set.

    Attributes:
      equal: Files that are equal byte for byte.
      alike: Others that look alike; None if that is not known for all images.
    """

    equal: Copies
    alike: Copies | None


def find_copies(images: Images) -> Found:
    """Searches a data set for copies."""
    rows = images.rows
    equal = equal_files(rows["digest"])
    alike = None
    if rows["hashed"].all():
        alone = np.ones(len(rows), bool)
        alone[equal.second] = False
        alike = _sorted(look_alike(rows["hash"], np.flatnonzero(alone)), images)
    return Found(_sorted(equal, images), alike)


def _sorted(pairs: Pairs, images: Images) -> Copies:
    labels = images.rows["label"]
    two_classes = labels[pairs.first] != labels[pairs.second]
    two_splits = images.splits[pairs.first] != images.splits[pairs.second]
    order = np.lexsort((pairs.first, pairs.distance, ~two_splits, ~two_classes))
    return Copies(
        Pairs(pairs.first[order], pairs.second[order], pairs.distance[order], pairs.complete),
        two_classes[order],
        two_splits[order],
    )


def list_copies(found: Found, images: Images) -> str:
    """Returns the pairs as lines of JSON, at most 10,000 of each kind."""
    lines = []
    for copies, equal in ((found.equal, True), (found.alike, False)):
        if copies is None:
            continue
        pairs = copies.pairs
        for first, second, distance in zip(
            pairs.first[:_MOST_LINES].tolist(),
            pairs.second[:_MOST_LINES].tolist(),
            pairs.distance[:_MOST_LINES].tolist(),
        ):
            both = [_as_json(images.read(place)) for place in (first, second)]
            lines.append(json.dumps({"equal_files": equal, "distance": distance, "images": both}))
    return "".join(f"{line}\n" for line in lines)


def _as_json(image: Image) -> dict[str, Any]:
    return {
        "split": image.split,
        "class": image.label,
        "file": image.file,
        "shard": image.shard,
        "record": image.record,
    }
