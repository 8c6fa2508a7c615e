"""Which images ``prepare`` puts into which shard.

The seed settles that before any work. Where images are files that may come and go, it stays
settled: it is kept in a file, of which a later run takes the difference to the files that there
are. So a shard is made again only if its own images have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
from collections.abc import Container, Mapping
from pathlib import Path

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.data.sources import Listed, Source

FILE = "prepare.plan"

# By name of the shard, the images in it.
Lists = dict[str, list[Listed]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A shard to be made.

    Attributes:
      split: Of which it is a part.
      file: Its name.
      places: Where the source has its images, in order: the numbers of a split of the source and of
        an image in it, int64 of shape (images, 2).
      digest: Of the images' names, labels and sizes; empty where the source does not list them.
    """

    split: str
    file: str
    places: np.ndarray
    digest: str = ""


def split_of(file: str) -> str:
    """Returns the split of the shard of that name."""
    return file.partition("-")[0]


def deal(images: Mapping[str, int], shards: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Deals images to shards at random, equally many to each of a split.

    Args:
      images: Their number by split.
      shards: Likewise.
      seed: Of the shuffle.

    Returns:
      By name of the shard, the images' indices in their split.
    """
    dealt = {}
    for number, split in enumerate(shards):
        # RandomState, unlike Generator, promises the same stream in every version of NumPy.
        order = np.random.RandomState([seed, number]).permutation(images[split])
        for shard, indices in enumerate(np.array_split(order, shards[split])):
            dealt[f"{split}-{shard:05d}-of-{shards[split]:05d}"] = indices
    return dealt


def tasks_of(source: Source, dealt: Mapping[str, np.ndarray]) -> list[Task]:
    """Returns the shards of a source that does not list its images."""
    numbers = {split: number for number, split in enumerate(source.splits)}
    return [
        Task(split_of(file), file, _pairs(np.full(len(own), numbers[split_of(file)]), own))
        for file, own in dealt.items()
    ]


def lists_of(files: Mapping[str, list[Listed]], dealt: Mapping[str, np.ndarray]) -> Lists:
    """Returns the images of each shard as the seed alone has them."""
    return {
        file: [files[split_of(file)][index] for index in indices] for file, indices in dealt.items()
    }


def tasks_of_lists(files: Mapping[str, list[Listed]], lists: Lists) -> list[Task]:
    """Returns the shards with the given images, which the source has in ``files``."""
    places = {
        image: (number, index)
        for number, members in enumerate(files.values())
        for index, image in enumerate(members)
    }
    tasks = []
    for file, images in lists.items():
        pairs = np.array([places[image] for image in images], np.int64).reshape(-1, 2)
        tasks.append(Task(split_of(file), file, pairs, digest(images)))
    return tasks


def digest(images: list[Listed]) -> str:
    """Returns a hex SHA-256 of what is listed."""
    found = hashlib.sha256()
    for file, label, size in images:
        found.update(f"{file}\0{label}\0{size}\n".encode(errors="surrogateescape"))
    return found.hexdigest()


def follow(settled: Lists, files: Mapping[str, list[Listed]], done: Container[str]) -> Lists | None:
    """Returns what was settled, without images that are gone and with new ones.

    An image stays in its shard, and in its split where that was chosen at random. New ones are
    dealt to shards that are still to be made, if there are any.

    Args:
      settled: Images by shard.
      files: Images that there are, by split.
      done: Names of the shards that are made.

    Returns:
      None if fewer than half of the images are still there: then they are others.
    """
    there = {image for members in files.values() for image in members}
    lists = {file: [own for own in images if own in there] for file, images in settled.items()}
    known = {image for images in lists.values() for image in images}
    if 2 * len(known) < sum(map(len, settled.values())):
        return None
    for split, members in files.items():
        shards = [file for file in lists if split_of(file) == split]
        shards = [file for file in shards if file not in done] or shards
        heap = [(len(lists[file]), file) for file in shards]
        heapq.heapify(heap)
        for image in members:
            if image not in known:
                count, file = heap[0]
                lists[file].append(image)
                heapq.heapreplace(heap, (count + 1, file))
    return lists


def read_lists(directory: Path) -> Lists | None:
    """Returns what an earlier run has settled; None if there is nothing.

    Raises:
      UserError: It cannot be read.
    """
    path = directory / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        shards = map(json.loads, lines)
        return {own["file"]: [Listed(*image) for image in own["images"]] for own in shards}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete {directory}") from error


def write_lists(directory: Path, lists: Lists) -> None:
    """Keeps what is settled for later runs.

    Raises:
      OSError: It cannot be written.
    """
    lines = [json.dumps({"file": file, "images": images}) for file, images in lists.items()]
    write_file(directory / FILE, "".join(f"{line}\n" for line in lines))


def remove_lists(directory: Path) -> None:
    """Removes what was kept.

    Raises:
      OSError: It cannot be removed.
    """
    (directory / FILE).unlink(missing_ok=True)


def _pairs(splits: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.stack([splits, indices], axis=1).astype(np.int64)
