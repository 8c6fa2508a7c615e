"""Lossless conversion of progressive JPEGs to baseline JPEGs by libjpeg-turbo's ``jpegtran``.

A baseline JPEG can be indexed and decodes faster; a progressive one stores each block in several
scans, all of which must be decoded for any crop.
"""

from __future__ import annotations

import io
import shutil
import subprocess

from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.images import EncodedImage

_PROGRAM = "jpegtran"
_SECONDS = 60  # Pillow has decoded the image before; this one takes milliseconds.


def find_jpegtran() -> str:
    """Returns the path of ``jpegtran``, after trying it.

    Raises:
      UserError: it is not installed, cannot be run, or does not make baseline JPEGs.
    """
    path = shutil.which(_PROGRAM)
    if path is None:
        raise UserError(
            f"make_baseline needs the program {_PROGRAM}: install libjpeg-turbo-progs (Debian, "
            "Ubuntu), libjpeg-turbo-utils (Fedora) or jpeg-turbo (Homebrew)"
        )
    trial = io.BytesIO()
    pixels = Image.new("RGB", (16, 16), "red")
    pixels.save(trial, "JPEG", progressive=True)
    converted = _converted(trial.getvalue(), path)
    if converted is None or "progressive" in converted[1].info:
        raise UserError(
            f"make_baseline: {path} does not make baseline JPEGs, as libjpeg-turbo's {_PROGRAM} "
            "does (mozjpeg's does not): put that first in PATH"
        )
    return path


def is_progressive(image: EncodedImage) -> bool:
    """Returns whether an image is a progressive JPEG."""
    return image.converted_from is None and "progressive" in image.pixels.info


def to_baseline(image: EncodedImage, jpegtran: str) -> EncodedImage:
    """Returns a JPEG with the same pixels and metadata, in one Huffman-coded scan.

    ``jpegtran`` is the path of the program.

    Returns:
      The new image, or the same one if ``jpegtran`` finds it damaged, or if the pixels would
      differ: decoders smooth progressive JPEGs whose last scans are missing, but not baseline ones.

    Raises:
      UserError: ``jpegtran`` cannot be run.
    """
    converted = _converted(image.data, jpegtran)
    if converted is None or converted[1].tobytes() != image.pixels.tobytes():
        return image
    return image._replace(data=converted[0], converted_from="progressive JPEG")


def _converted(jpeg: bytes, jpegtran: str) -> tuple[bytes, Image.Image] | None:
    """Returns the program's output and its decoded pixels; None if it fails.

    Raises:
      UserError: the program cannot be run.
    """
    command = [jpegtran, "-copy", "all", "-optimize"]
    try:
        done = subprocess.run(
            command, input=jpeg, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        raise UserError(f"make_baseline: {jpegtran} cannot be run: {error.strerror}") from error
    if done.returncode:
        return None
    try:
        image = Image.open(io.BytesIO(done.stdout))
        image.load()
    except Exception:  # of any class: Pillow's decoders raise what they like
        return None
    return done.stdout, image
