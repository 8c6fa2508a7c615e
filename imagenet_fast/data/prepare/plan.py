"""Assignment of images to the shards that ``prepare`` writes.

The seed determines the assignment before any work. If the source's images are files, which may
come and go, the assignment is saved, and a later run updates it by the files that were added or
removed, so that a shard is rewritten only if its own images have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import TypedDict

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import MAX_JSON, parse_json
from imagenet_fast.base.paths import Path
from imagenet_fast.data.prepare.sources import ListedFile, Source

FILE = "prepare.plan"
TASKS = "prepare.tasks"  # those of workers elsewhere, under a temporary name

# By shard file: its images.
Assignment = dict[str, list[ListedFile]]


class _Planned(TypedDict):
    file: str
    images: list[ListedFile]


@dataclasses.dataclass(frozen=True)
class Task:
    """A shard to be written.

    Its ``places`` are those of its images in order: the index of the source's split and of the
    image in it, int64 of shape (images, 2).
    """

    split: str
    file: str
    places: np.ndarray
    digest: str = ""  # of the images' names, labels and sizes, if the source lists files


def split_of(file: str) -> str:
    """Returns the split of a shard, by its name."""
    return file.partition("-")[0]


def deal(images: Mapping[str, int], shards: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Deals shuffled images to shards, equally many to each shard of a split.

    ``images`` and ``shards`` are their numbers by split.

    Returns:
      By shard file, the images' indices in their split.
    """
    dealt: dict[str, np.ndarray] = {}
    for number, split in enumerate(shards):
        # RandomState, unlike Generator, promises the same stream in every version of NumPy.
        order = np.random.RandomState([seed, number]).permutation(images[split])
        parts = np.array_split(order, shards[split])
        dealt |= dict(zip(shard_names({split: shards[split]}), parts))
    return dealt


def shard_names(shards: Mapping[str, int]) -> list[str]:
    """Returns the names of all shards, given their number by split."""
    return [
        f"{split}-{number:05d}-of-{count:05d}"
        for split, count in shards.items()
        for number in range(count)
    ]


def tasks_by_index(source: Source, dealt: Mapping[str, np.ndarray]) -> list[Task]:
    """Returns the tasks for a source that does not list files."""
    numbers = {split: number for number, split in enumerate(source.splits)}
    tasks = []
    for file, indices in dealt.items():
        pairs = np.stack([np.full(len(indices), numbers[split_of(file)]), indices], axis=1)
        tasks.append(Task(split_of(file), file, pairs.astype(np.int64)))
    return tasks


def assignment_by_seed(
    files: Mapping[str, list[ListedFile]], dealt: Mapping[str, np.ndarray]
) -> Assignment:
    """Returns the assignment that the seed alone determines."""
    return {
        file: [files[split_of(file)][index] for index in indices] for file, indices in dealt.items()
    }


def tasks_by_file(files: Mapping[str, list[ListedFile]], assignment: Assignment) -> list[Task]:
    """Returns the tasks for an assignment of a source's ``files``."""
    places = {
        image: (number, index)
        for number, members in enumerate(files.values())
        for index, image in enumerate(members)
    }
    tasks = []
    for file, images in assignment.items():
        pairs = np.array([places[image] for image in images], np.int64).reshape(-1, 2)
        tasks.append(Task(split_of(file), file, pairs, digest(images)))
    return tasks


def digest(images: list[ListedFile]) -> str:
    """Returns a hex SHA-256 of the images' names, labels and sizes."""
    state = hashlib.sha256()
    for image in images:
        text = f"{image.file}\0{image.label}\0{image.size}\n"
        state.update(text.encode(errors="surrogateescape"))
    return state.hexdigest()


def update(
    assignment: Assignment, files: Mapping[str, list[ListedFile]], written: Container[str]
) -> Assignment | None:
    """Returns an assignment without removed images and with new ones.

    An image stays in its shard, and in its split if that was chosen at random. New images go to the
    smallest shards, of those that are not ``written`` yet if there are any. ``files`` are the
    source's present images.

    Returns:
      None if fewer than half of the images are still there, so that it is another data set.
    """
    present = {image for members in files.values() for image in members}
    updated = {
        file: [image for image in images if image in present] for file, images in assignment.items()
    }
    kept = {image for images in updated.values() for image in images}
    # Copies of an image must be in one split, and images of a group.
    splits = {image.file: split_of(file) for file, images in updated.items() for image in images}
    groups = {image.group: split_of(file) for file, images in updated.items() for image in images}
    groups.pop("", None)
    if 2 * len(kept) < sum(map(len, assignment.values())):
        return None
    by_split: dict[str, list[ListedFile]] = defaultdict(list)
    for own, members in files.items():
        for image in members:
            by_split[splits.get(image.file, groups.get(image.group, own))].append(image)
    for split, members in by_split.items():
        shards = [file for file in updated if split_of(file) == split]
        shards = [file for file in shards if file not in written] or shards
        heap = [(len(updated[file]), file) for file in shards]
        heapq.heapify(heap)
        for image in members:
            if image not in kept:
                count, file = heap[0]
                updated[file].append(image)
                heapq.heapreplace(heap, (count + 1, file))
    return updated


def read_assignment(directory: Path) -> Assignment | None:
    """Returns the assignment that an earlier run saved, or None.

    Raises:
      UserError: it cannot be read.
    """
    path = directory / FILE
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_JSON), b"")
            shards = [parse_json(line, _Planned) for line in lines]
        return {shard["file"]: shard["images"] for shard in shards}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete {directory}") from error


def write_assignment(directory: Path, assignment: Assignment) -> None:
    """Saves an assignment for later runs.

    Raises:
      OSError: it cannot be written.
    """
    lines = [json.dumps({"file": file, "images": images}) for file, images in assignment.items()]
    write_file(directory / FILE, "".join(f"{line}\n" for line in lines))
