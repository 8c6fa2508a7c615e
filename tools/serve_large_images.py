#!/usr/bin/env python3
r"""Measures the memory and time that an exported model needs for large PNGs.

    imagenet-fast export --model_dir=runs/photos --saved_model=runs/photos_exported
    python tools/serve_large_images.py --saved_model=runs/photos_exported \
        --output_dir=benchmarks/serving/large_images

A separate process classifies each file several times, after a small JPEG. Its memory is its peak
resident memory.
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

import numpy as np
from PIL import Image

# The PNG colour type and the channels of each kind.
_KINDS = {"opaque": (2, 3), "transparent": (6, 4)}


def write_png(path: pathlib.Path, side: int, kind: str) -> None:
    """Writes a square PNG of 8 bits, row by row."""
    colour_type, channels = _KINDS[kind]
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        header = struct.pack(">IIBBBBB", side, side, 8, colour_type, 0, 0, 0)
        file.write(_chunk(b"IHDR", header))
        compressor = zlib.compressobj(1)
        row = np.arange(side * channels) // channels % 251
        for number in range(side):
            data = compressor.compress(b"\0" + (row + number // 16).astype(np.uint8).tobytes())
            if data:
                file.write(_chunk(b"IDAT", data))
        file.write(_chunk(b"IDAT", compressor.flush()))
        file.write(_chunk(b"IEND", b""))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def serve(saved_model: str, image: str, repeats: int) -> dict[str, Any]:
    """Classifies an image in this process; returns seconds, bytes of memory and the error."""
    import tensorflow as tf

    from imagenet_fast.lab.benchmarks.process_memory import memory

    signatures = tf.saved_model.load(saved_model).signatures
    classify = signatures["serving_default"]
    small = io.BytesIO()
    Image.new("RGB", (500, 375)).save(small, "JPEG")
    classify(images=tf.constant([small.getvalue()]))
    before = memory("VmHWM")
    encoded = tf.constant([pathlib.Path(image).read_bytes()])
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        error = classify(images=encoded)["error"].numpy()[0].decode()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "before": before, "peak": memory("VmHWM"), "error": error}


def main(arguments: list[str]) -> None:
    """Runs the measurement of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saved_model", required=True, help="directory that `export` wrote")
    parser.add_argument("--megapixels", default="1,12,100,400", help="sizes, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="predictions for each file")
    parser.add_argument("--output_dir", help="where to write large_images.json and .txt")
    parser.add_argument("--image", help=argparse.SUPPRESS)  # for the processes that classify
    options = parser.parse_args(arguments)
    if options.image:
        print(json.dumps(serve(options.saved_model, options.image, options.repeats)))
        return

    from imagenet_fast.base import environment
    from imagenet_fast.base.files import write_results
    from imagenet_fast.lab.benchmarks.report import aligned, cpu

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for megapixels in map(int, options.megapixels.split(",")):
            for kind in _KINDS:
                image = pathlib.Path(folder, "image.png")
                write_png(image, round((megapixels * 1e6) ** 0.5), kind)
                finished = subprocess.run(
                    [sys.executable, __file__, *arguments, f"--image={image}"],
                    stdout=subprocess.PIPE,
                    check=True,
                )
                result = json.loads(finished.stdout.splitlines()[-1])
                size = image.stat().st_size
                results.append({"megapixels": megapixels, "kind": kind, "bytes": size, **result})
                print(*_cells(results[-1]), file=sys.stderr)
    text = "\n".join(
        [
            *aligned([_HEAD, *map(_cells, results)], left=(1, len(_HEAD) - 1)),
            "",
            f"medians of {options.repeats} predictions; more: than after a small JPEG",
            f"on {cpu()}",
            "",
        ]
    )
    print(text, end="")
    if options.output_dir:
        values = {"repeats": options.repeats, "results": results, **environment.provenance()}
        files = {
            "large_images.txt": text,
            "large_images.json": json.dumps(values, indent=2) + "\n",
        }
        write_results(options.output_dir, files)


_HEAD = ("MP", "kind", "file, MB", "seconds", "peak, MB", "more, MB", "error")


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(result["megapixels"]),
        result["kind"],
        f"{result['bytes'] / 1e6:.2f}",
        f"{statistics.median(result['seconds']):.3f}",
        f"{result['peak'] / 1e6:.0f}",
        f"{(result['peak'] - result['before']) / 1e6:.0f}",
        result["error"] or "-",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
