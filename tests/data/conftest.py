"""Data sets small enough that a test can tell each image."""

import pathlib

import numpy as np
import pytest

from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import records
from imagenet_fast.data.images import encode_pixels


@pytest.fixture(scope="session")
def numbered_example():
    """A serialised example whose label is its number: numbered_example(number, jpeg=None)."""

    def encode(number, jpeg=None, label=None):
        pixels = np.random.RandomState(number).randint(0, 256, (12, 10, 3)).astype(np.uint8)
        return records.encode_example(
            encode_pixels(pixels).jpeg if jpeg is None else jpeg,
            label=number if label is None else label,
            text=str(number),
            filename=f"{number}.jpg",
            height=12,
            width=10,
            channels=3,
        )

    return encode


@pytest.fixture(scope="session")
def write_data():
    """Writes shards: write_data(directory, labels=61, train=[shard of records, ...]).

    With ``labels``, the number of classes, there is a manifest; without, only the shards.
    Returns the directory's name.
    """

    def write(directory, labels=0, label_offset=0, **splits):
        directory = pathlib.Path(directory)
        directory.mkdir(exist_ok=True)
        written = {}
        for split, shards in splits.items():
            files = [f"{split}-{index:05d}-of-{len(shards):05d}" for index in range(len(shards))]
            written[split] = manifests.Split(
                shards=tuple(
                    manifests.Shard(file, *records.write_records(directory / file, shard))
                    for file, shard in zip(files, shards)
                ),
                # Nothing but verify reads how many there are of each.
                class_counts=(sum(map(len, shards)), *[0] * (labels - 1)),
            )
        if labels:
            names = tuple(f"class {label}" for label in range(labels))
            manifest = manifests.Manifest("numbers", names, written, label_offset)
            manifests.write_manifest(manifest, directory)
        return str(directory)

    return write
