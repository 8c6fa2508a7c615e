"""Lossless conversion of progressive JPEGs to baseline JPEGs by libjpeg-turbo's ``jpegtran``.

A baseline JPEG can be indexed and decodes faster; a progressive one stores each block in several
scans, all of which must be decoded for any crop.
"""

from __future__ import annotations

import shutil
import subprocess

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.images import EncodedImage

_PROGRAM = "jpegtran"
_SECONDS = 60  # Pillow has decoded the image before; this one takes milliseconds.


def find_jpegtran() -> str:
    """Returns the path of ``jpegtran``.

    Raises:
      UserError: It is not installed.
    """
    path = shutil.which(_PROGRAM)
    if path is None:
        raise UserError(
            f"make_baseline needs the program {_PROGRAM}: install libjpeg-turbo-progs (Debian, "
            "Ubuntu), libjpeg-turbo-utils (Fedora) or jpeg-turbo (Homebrew)"
        )
    return path


def is_progressive(image: EncodedImage) -> bool:
    """Returns whether an image is a progressive JPEG."""
    return image.converted_from is None and "progressive" in image.pixels.info


def to_baseline(image: EncodedImage, jpegtran: str) -> EncodedImage:
    """Returns a JPEG with the same pixels and metadata, in one Huffman-coded scan.

    Args:
      image: A JPEG.
      jpegtran: Path of the program.

    Returns:
      The new image, or the same one if ``jpegtran`` finds it damaged.

    Raises:
      OSError: ``jpegtran`` cannot be run.
    """
    command = [jpegtran, "-copy", "all", "-optimize"]
    try:
        done = subprocess.run(
            command, input=image.data, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return image
    if done.returncode:
        return image
    return image._replace(data=done.stdout, converted_from="progressive JPEG")
