#!/usr/bin/env python3
r"""Fuzzes an exported model with mutated image files, and checks its predictions for good images.

    imagenet-fast export --model_dir=runs/photos --saved_model=runs/photos_exported
    python tools/serve_mutants.py --saved_model=runs/photos_exported --count=10000 \
        --output_dir=benchmarks/serving/mutants

Files of eight formats have bits flipped, ends truncated, bytes of headers replaced, or parts of
other files spliced in; half of the PNGs then get correct checksums, so that the damage reaches the
decoder. Each request has mutants between two good images, and every tenth mutant is also sent
alone. A mutant must get finite probabilities or an error, and the good images their usual
predictions. Otherwise the program fails; if the server's code crashes, it ends by a signal.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import re
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

Answers = dict[str, np.ndarray]

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "ICO")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = 64
_PER_REQUEST = 8
_ALONE_EVERY = 10


def originals(seed: int = 0) -> list[tuple[str, bytes]]:
    """Returns valid files as (format, bytes), several kinds of JPEG and PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), np.uint8)
    image = Image.fromarray(pixels).resize((56, 48), Image.Resampling.BICUBIC)
    alpha = image.copy()
    alpha.putalpha(image.convert("L"))
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    kinds: list[tuple[str, Image.Image, dict[str, Any]]] = [
        *((form, image, {}) for form in _FORMATS),
        ("JPEG", image.convert("L"), {}),
        ("JPEG", image.convert("CMYK"), {}),
        ("JPEG", image, {"progressive": True, "subsampling": 0}),
        ("PNG", alpha, {}),
        ("PNG", image.quantize(16), {"transparency": 3}),
        ("PNG", deep, {}),
    ]
    files = []
    for form, kind, options in kinds:
        file = io.BytesIO()
        kind.save(file, form, **options)
        files.append((form, file.getvalue()))
    return files


def mutants(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yields mutated files as (format, bytes), cycling through the formats."""
    files = originals(seed)
    by_format = {form: [data for other, data in files if other == form] for form in _FORMATS}
    random = np.random.default_rng([seed, 1])
    for number in range(count):
        form = _FORMATS[number % len(_FORMATS)]
        data = by_format[form][random.integers(len(by_format[form]))]
        mutate = _MUTATIONS[random.integers(len(_MUTATIONS))]
        data = mutate(data, files[random.integers(len(files))][1], random)
        if data.startswith(_PNG_SIGNATURE) and random.integers(2):
            data = with_correct_checksums(data)
        yield form, data


def _flip_bits(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    mutated = bytearray(data)
    for place in random.integers(8 * len(data), size=random.integers(1, 20)):
        mutated[place // 8] ^= 1 << place % 8
    return bytes(mutated)


def _truncate(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    return data[: random.integers(len(data))]


def _edit_header(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    mutated = bytearray(data)
    length = int(random.integers(1, 5))
    values = (bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x40\x00", random.bytes(4))
    place = random.integers(min(_HEADER, len(data) - length))
    mutated[place : place + length] = values[random.integers(len(values))][:length]
    return bytes(mutated)


def _splice(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    return data[: random.integers(len(data))] + other[random.integers(len(other)) :]


_MUTATIONS: tuple[Callable[[bytes, bytes, np.random.Generator], bytes], ...] = (
    _flip_bits,
    _truncate,
    _edit_header,
    _splice,
)


def with_correct_checksums(png: bytes) -> bytes:
    """Returns a PNG with correct checksums in all complete chunks."""
    mutated, place = bytearray(png), len(_PNG_SIGNATURE)
    while place + 12 <= len(png):
        end = place + 8 + struct.unpack_from(">I", png, place)[0]
        if end + 4 > len(png):
            break
        struct.pack_into(">I", mutated, end, zlib.crc32(png[place + 4 : end]))
        place = end + 4
    return bytes(mutated)


def serve_mutants(
    answer: Callable[[list[bytes]], Answers], count: int, seed: int = 0
) -> dict[str, collections.Counter[str]]:
    """Sends mutants among good images to a model.

    Args:
      answer: maps encoded images to the outputs of the signature ``serving_default``.
      count: of mutants.
      seed: of the mutants.

    Returns:
      The number of each error message by format, with N for numbers in messages and ``""`` for
      predictions.

    Raises:
      AssertionError: if a good image's prediction changes, or a mutant gets neither a prediction
        nor an error.
    """
    good = [data for form, data in originals(seed) if form in ("JPEG", "PNG")][:2]
    expected = answer(good)
    assert (expected["error"] == b"").all()
    outcomes = {form: collections.Counter[str]() for form in _FORMATS}
    waiting: list[tuple[str, bytes]] = []

    def send() -> None:
        request = [good[0], *(data for _, data in waiting), good[1]]
        answers = answer(request)
        _check_good(expected, answers)
        for (form, _), error in zip(waiting, answers["error"][1:-1]):
            outcomes[form][re.sub(r"\d+", "N", error.decode())] += 1
        _check_mutants(answers)
        waiting.clear()

    for number, mutant in enumerate(mutants(count, seed)):
        waiting.append(mutant)
        if number % _ALONE_EVERY == 0:
            _check_mutants(answer([mutant[1]]))
        if len(waiting) == _PER_REQUEST:
            send()
    if waiting:
        send()
    _check_good(expected, answer(good))
    return outcomes


def _check_good(expected: Answers, answers: Answers) -> None:
    for name in ("classes", "labels", "error"):
        np.testing.assert_array_equal(answers[name][[0, -1]], expected[name])
    # Batches of other sizes are rounded differently.
    np.testing.assert_allclose(
        answers["probabilities"][[0, -1]], expected["probabilities"], rtol=0, atol=1e-5
    )


def _check_mutants(answers: Answers) -> None:
    bad = answers["error"] != b""
    assert (answers["classes"][bad] == -1).all() and (answers["classes"][~bad] >= 0).all()
    assert (answers["probabilities"][bad] == 0).all()
    assert (answers["probabilities"][~bad] >= 0).all()  # false for NaN


def main(arguments: list[str]) -> None:
    """Runs the test of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saved_model", required=True, help="directory that `export` wrote")
    parser.add_argument("--count", type=int, default=10_000, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants")
    parser.add_argument("--output_dir", help="where to write mutants.json")
    options = parser.parse_args(arguments)

    import tensorflow as tf

    from imagenet_fast.base import environment
    from imagenet_fast.base.files import write_results
    from imagenet_fast.lab.benchmarks.process_memory import memory

    signatures = tf.saved_model.load(options.saved_model).signatures
    classify = signatures["serving_default"]

    def answer(images: list[bytes]) -> Answers:
        return {name: a.numpy() for name, a in classify(images=tf.constant(images)).items()}

    start = time.monotonic()
    outcomes = serve_mutants(answer, options.count, options.seed)
    results = {
        "mutants": options.count,
        "seed": options.seed,
        "seconds": round(time.monotonic() - start, 1),
        "peak_memory_mb": round(memory("VmHWM") / 1e6),
        "good images with another answer": 0,
        "answers ('' is an image) by format": outcomes,
        **environment.provenance(),
    }
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if options.output_dir:
        write_results(options.output_dir, {"mutants.json": text})


if __name__ == "__main__":
    main(sys.argv[1:])
