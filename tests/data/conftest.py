"""Data sets small enough that a test can tell each image."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import records
from imagenet_fast.data.decode import evaluation_image
from imagenet_fast.data.examples import ENCODED, decode_example, encode_example
from imagenet_fast.data.images import encode_pixels

CLASSES = 61


@pytest.fixture(scope="session")
def identities():
    """Identities of images at places that follow each other: identities(count, seed=3, epoch=5)."""

    def identify(count, seed=3, epoch=5):
        return np.stack([np.full(count, seed), np.full(count, epoch), np.arange(count)], axis=1)

    return identify


@pytest.fixture(scope="session")
def numbered_example():
    """A serialized example whose label is its number: numbered_example(number, jpeg=None)."""

    def encode(number, jpeg=None, label=None):
        pixels = np.random.RandomState(number).randint(0, 256, (12, 10, 3)).astype(np.uint8)
        return encode_example(
            encode_pixels(pixels).data if jpeg is None else jpeg,
            label=number if label is None else label,
            text=str(number),
            filename=f"{number}.jpg",
            height=12,
            width=10,
            channels=3,
        )

    return encode


@pytest.fixture(scope="session")
def numbered_examples(numbered_example):
    """The examples of the numbers from 0 to 60, images of 12 x 10 pixels."""
    return [numbered_example(number) for number in range(CLASSES)]


@pytest.fixture(scope="session")
def evaluated(numbered_examples):
    """Each numbered image as evaluation sees it: uint8 [61, 8, 8, 3]."""
    config = Config(image_size=8)
    encoded = [decode_example(example)[ENCODED][0] for example in numbered_examples]
    return np.stack([evaluation_image(image, config) for image in encoded])


@pytest.fixture(scope="session")
def bad_examples(numbered_example, numbered_examples):
    """The numbered examples, some of them unreadable, and the numbers of those."""
    examples = list(numbered_examples)
    jpeg = decode_example(examples[9])[ENCODED][0]
    examples[4] = numbered_example(4, jpeg=b"\xff\xd8\xff not a JPEG")
    examples[9] = numbered_example(9, jpeg=jpeg[: len(jpeg) // 2])
    examples[10] = numbered_example(10, jpeg=b"")
    examples[20] = numbered_example(20, label=CLASSES)
    examples[33] = numbered_example(33, label=-1)
    examples[40] = b"not an Example"
    without_label = tf.train.Example()
    without_label.features.feature[ENCODED].bytes_list.value.append(jpeg)
    examples[44] = without_label.SerializeToString()
    examples[60] = numbered_example(60, jpeg=b"GIF89a")
    return examples, [4, 9, 10, 20, 33, 40, 44, 60]


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
