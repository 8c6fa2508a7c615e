"""Fashion-MNIST for searches: a tenth of the training images is held out for validation.

    python tools/studies/equal_seconds/search_data.py --output_dir=data/fashion_mnist_search

writes shards without the test images, on which the study measures what the searches found.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import Source, open_source
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.data.prepare.sources.holdout import hold_out

_FRACTION, _SEED, _SIZE = 0.1, 0, 32


def main(arguments: Sequence[str]) -> int:
    """Writes the shards; returns 0, or 2 after a user error."""
    parser = argparse.ArgumentParser(
        "search_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument(
        "--source_path", help="Fashion-MNIST's idx files (default: of dataset-fashion-mnist)"
    )
    given = parser.parse_args(arguments)
    try:
        source = open_source("idx", given.source_path, pad_to=_SIZE)
        prepare(without_test_images(source), given.output_dir, encoding="png")
        return 0
    except UserError as error:
        print(f"search_data.py: error: {error}", file=sys.stderr)
        return 2


def without_test_images(source: Source) -> ArraySource:
    """Returns the training images of ``source``, of which the same part of each class validates."""
    items = [source.read("train", index) for index in range(source.splits["train"])]
    images = np.stack([item.image for item in items])
    labels = np.array([item.label for item in items])
    held_out = hold_out(labels, _FRACTION, _SEED)
    arrays = {
        split: (images[chosen], labels[chosen])
        for split, chosen in (("train", ~held_out), ("validation", held_out))
    }
    return ArraySource(source.kind, f"{source.name}_search", source.labels, arrays)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
