"""Duplicate and near-duplicate images of a prepared data set, the most harmful ones first."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import numpy as np

from imagenet_fast.base.paths import Path
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, FILENAME, decode_example
from imagenet_fast.data.manifest import Manifest
from imagenet_fast.data.metadata import classes_in
from imagenet_fast.data.prepare.similar_hashes import Pairs, equal_pairs, similar_pairs

FILE = "duplicates.jsonl"

_MAX_LINES = 10_000
_KEYS = ("split", "class", "file", "shard", "record")  # of an Image in JSON


class Image(NamedTuple):
    """An encoded image in a shard, with the names of its class, or of several, and of its file."""

    split: str
    label: str
    file: str
    shard: str
    record: int
    data: bytes


class Images:
    """Random access to the images of a prepared data set, by their index in ``rows``.

    Attributes:
      manifest: of the data set.
      rows: the images' metadata, [images], of dtype ``metadata.row_type``.
      splits: index of each image's split in the manifest, int64 of shape (images,).
    """

    def __init__(self, manifest: Manifest, rows: np.ndarray, directory: Path) -> None:
        self.manifest = manifest
        self.rows = rows
        self._directory = directory
        sizes = [split.examples for split in manifest.splits.values()]
        self.splits = np.repeat(np.arange(len(sizes)), sizes)
        self._shards = [shard.file for shard in manifest.shards]
        self._starts = np.cumsum([0, *(shard.examples for shard in manifest.shards)])

    def read(self, index: int) -> Image:
        """Reads an image.

        Raises:
          UserError: its record cannot be read.
        """
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        start = int(self._starts[shard])
        sizes = self.rows["record_bytes"][start:index].astype(np.int64) + records.OVERHEAD
        path = self._directory / self._shards[shard]
        record = records.read_record(path, index - start, offset=int(sizes.sum()))
        fields = decode_example(record)
        name = fields.get(FILENAME) or [b""]
        return Image(
            split=list(self.manifest.splits)[self.splits[index]],
            label=", ".join(self.manifest.labels[n] for n in classes_in(self.rows[[index]])[1]),
            file=name[0].decode(errors="replace"),
            shard=self._shards[shard],
            record=index - start,
            data=fields[ENCODED][0],
        )


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Pairs of images, the most harmful ones first: those in two classes, then in two splits.

    Attributes:
      pairs: the pairs.
      two_classes: whether the images of a pair have different labels, bool of shape (pairs,).
      two_splits: whether they are in different splits, bool of shape (pairs,).
    """

    pairs: Pairs
    two_classes: np.ndarray
    two_splits: np.ndarray

    def __len__(self) -> int:
        return len(self.pairs.first)

    def count_text(self) -> str:
        """Returns the number of pairs as text."""
        return f"{len(self):,}" if self.pairs.complete else f"at least {len(self):,}"

    def summary(self, what: str) -> str:
        """Returns the number of pairs, after ``what``, and of the harmful ones among them."""
        harmful = [
            f"{count:,} of them in two {kind}"
            for kind, count in (
                ("classes", self.two_classes.sum()),
                ("splits", self.two_splits.sum()),
            )
            if count
        ]
        return ", ".join([f"{what}: {self.count_text()}", *harmful])


class FoundDuplicates(NamedTuple):
    """The duplicates in a data set.

    Attributes:
      equal: files that are equal byte for byte.
      similar: other images with similar hashes; None if some images have no hash.
    """

    equal: Duplicates
    similar: Duplicates | None


def find_duplicates(images: Images) -> FoundDuplicates:
    """Searches a data set for equal files and similar images."""
    rows = images.rows
    equal = equal_pairs(rows["digest"])
    similar = None
    if rows["hashed"].all():
        is_first = np.ones(len(rows), bool)
        is_first[equal.second] = False
        similar = _sorted(similar_pairs(rows["hash"], np.flatnonzero(is_first)), images)
    return FoundDuplicates(_sorted(equal, images), similar)


def _sorted(pairs: Pairs, images: Images) -> Duplicates:
    # Of multi-label data, other labels.
    name = "classes" if images.manifest.multi_label else "label"
    labels = images.rows[name].reshape(len(images.rows), -1)
    two_classes = (labels[pairs.first] != labels[pairs.second]).any(axis=1)
    two_splits = images.splits[pairs.first] != images.splits[pairs.second]
    order = np.lexsort((pairs.first, pairs.distance, ~two_splits, ~two_classes))
    return Duplicates(
        Pairs(pairs.first[order], pairs.second[order], pairs.distance[order], pairs.complete),
        two_classes[order],
        two_splits[order],
    )


def duplicates_as_json_lines(found: FoundDuplicates, images: Images) -> str:
    """Returns the pairs as lines of JSON, at most 10,000 of each kind."""
    lines = []
    for duplicates, equal in ((found.equal, True), (found.similar, False)):
        if duplicates is None:
            continue
        pairs = duplicates.pairs
        columns = (pairs.first, pairs.second, pairs.distance)
        for *indices, distance in zip(*(column[:_MAX_LINES].tolist() for column in columns)):
            both = [dict(zip(_KEYS, images.read(index))) for index in indices]
            lines.append(json.dumps({"equal_files": equal, "distance": distance, "images": both}))
    return "".join(f"{line}\n" for line in lines)
