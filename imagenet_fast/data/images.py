"""One encoded image: whether training can use it, and as which JPEG or PNG.

Training can decode just a part of a JPEG (``tf.image.decode_and_crop_jpeg``), and finds out there
what is damaged. So every image is decoded here once, before training.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
# A JPEG with a second picture behind it (cameras write them) opens as MPO; decoders see the first.
_JPEG = ("JPEG", "MPO")

# The first bytes of each PNG.
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# What an image that must be encoded can become, with Pillow's options for it.
ENCODINGS = {"jpeg": {"quality": 95, "subsampling": 0}, "png": {}}

# Of a PNG's height and of its width; libpng, with which training decodes, refuses more.
_MOST_ACROSS = 1_000_000

# Of an object in an error's text: another one each time.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class BadImageError(ValueError):
    """The image cannot be used; the message is the reason, without the image's name."""


class TooManyPixelsError(BadImageError):
    """The image is too large to be decoded."""


class EncodedImage(NamedTuple):
    """An image file that training can decode: a JPEG or a PNG, grey or RGB, of 8 bits.

    Attributes:
      data: The file.
      height: In pixels.
      width: In pixels.
      channels: 3 (RGB) or 1 (grey).
      converted_from: What it was made from (``'PNG'``, ``'CMYK JPEG'``, ``'pixels'``), or None for
        a JPEG that is byte for byte the original.
    """

    data: bytes
    height: int
    width: int
    channels: int
    converted_from: str | None


def normalize_encoding(
    data: bytes, encoding: str = "jpeg", max_pixels: int | None = None
) -> EncodedImage:
    """Returns an image file as one that training can decode.

    Grey and RGB JPEGs stay as they are. Other JPEGs (CMYK, YCCK), PNG, GIF (its first frame), BMP
    and WebP, whatever they are named, are encoded anew, as grey if they were grey, and with 8 bits;
    what is transparent becomes white. Comments, colour profiles and other metadata are not copied.
    EXIF orientation is ignored, as ImageNet's own results do.

    Args:
      data: The image file.
      encoding: What is encoded anew becomes this, of ``ENCODINGS``: ``jpeg``, of quality 95 without
        chroma subsampling, or ``png``, which keeps each pixel.
      max_pixels: The most pixels, height times width, of an image that is decoded; None: as many
        as Pillow allows, 178,956,970.

    Raises:
      TooManyPixelsError: It has more.
      BadImageError: The format is none of these, or the pixels cannot all be decoded or encoded.
    """
    if not data:
        raise BadImageError("empty")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise TooManyPixelsError(
                f"{image.width} x {image.height} pixels, more than the limit of {max_pixels}"
            )
        image.load()
    except Image.UnidentifiedImageError as error:  # its own message holds a memory address
        raise BadImageError(f"no image of a known format; starts with {data[:4]!r}") from error
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"cannot be decoded: {_reason(error)}") from error
    except TooManyPixelsError:
        raise
    except Exception as error:  # Pillow lets errors of any class pass where a file is damaged.
        raise BadImageError(f"cannot be decoded: {_reason(error)}") from error
    if image.format in _JPEG and image.mode in ("L", "RGB"):
        return EncodedImage(data, image.height, image.width, len(image.getbands()), None)
    kind = f"{image.mode} JPEG" if image.format in _JPEG else image.format
    try:
        image = to_grey_or_rgb(image)
    except Exception as error:
        raise BadImageError(f"cannot become grey or RGB: {_reason(error)}") from error
    return _encode(image, encoding, kind)


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in the mode ``L`` if it is grey, else ``RGB``, on white if it has alpha."""
    if image.mode.startswith("I"):  # 16-bit grey, which convert("L") would clip at 255
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        grey = image.mode in ("LA", "L", "1")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def encode_pixels(pixels: np.ndarray, encoding: str = "jpeg") -> EncodedImage:
    """Returns raw pixels as an image file.

    Args:
      pixels: uint8 of shape (height, width) for grey, or (height, width, 3) for RGB.
      encoding: As ``normalize_encoding``.

    Raises:
      BadImageError: They cannot be encoded.
      ValueError: Another shape or dtype.
    """
    grey_or_rgb = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)
    if pixels.dtype != np.uint8 or not grey_or_rgb or not pixels.size:
        raise ValueError(
            "pixels must be uint8 of shape (height, width) or (height, width, 3), "
            f"not {pixels.dtype} of shape {pixels.shape}"
        )
    return _encode(Image.fromarray(pixels), encoding, "pixels")


def _encode(image: Image.Image, encoding: str, converted_from: str) -> EncodedImage:
    # Pillow would copy comments and the colour profile, and fails where they are long or damaged.
    image.info.clear()
    buffer = io.BytesIO()
    try:
        if encoding == "png" and max(image.size) > _MOST_ACROSS:
            raise ValueError(f"more than {_MOST_ACROSS} each way could not be decoded")
        image.save(buffer, encoding, **ENCODINGS[encoding])
    except Exception as error:  # a JPEG has at most 65500 pixels each way
        raise BadImageError(
            f"{image.width} x {image.height} pixels cannot be encoded as {encoding}: "
            f"{_reason(error)}"
        ) from error
    channels = len(image.getbands())
    return EncodedImage(buffer.getvalue(), image.height, image.width, channels, converted_from)


def _reason(error: Exception) -> str:
    """Returns what an error says, in one line that is always the same, or else its class."""
    text = " ".join(str(error).split())
    return _ADDRESS.sub("", text) or type(error).__name__
