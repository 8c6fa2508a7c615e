#!/usr/bin/env python3
"""Extracts images from shards as files named CLASS-NUMBER.jpg or .png.

python tools/extract_images.py --data_dir=data/digits --out=images --count=8
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import re

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.examples import ENCODED, TEXT, decode_example
from imagenet_fast.data.manifest import read_manifest
from imagenet_fast.data.records import read_records
from imagenet_fast.distribute.quiet import import_tensorflow


def main() -> None:
    """Writes the first images of a split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True, help="directory of `imagenet-fast prepare`")
    parser.add_argument(
        "--split",
        default="validation",
        choices=("train", "validation"),
        help="default: %(default)s",
    )
    parser.add_argument("--out", required=True, type=pathlib.Path, help="directory for the files")
    parser.add_argument("--count", type=int, default=8, help="images (default: %(default)s)")
    options = parser.parse_args()

    import_tensorflow()
    try:
        shards = read_manifest(options.data_dir).splits[options.split].shards
    except UserError as error:
        parser.error(str(error))
    paths = (pathlib.Path(options.data_dir, shard.file) for shard in shards)
    records = itertools.chain.from_iterable(map(read_records, paths))
    options.out.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(itertools.islice(records, options.count)):
        example = decode_example(record)
        label = re.sub(r"\W+", "-", example[TEXT][0].decode())
        image = example[ENCODED][0]
        suffix = "png" if image.startswith(b"\x89PNG") else "jpg"
        (options.out / f"{label}-{number}.{suffix}").write_bytes(image)


if __name__ == "__main__":
    main()
