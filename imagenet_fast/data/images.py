"""One encoded image: whether training can use it, and as which JPEG or PNG.

Training can decode just a part of a JPEG (``tf.image.decode_and_crop_jpeg``), and finds out there
what is damaged. So every image is decoded here once, before training.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, TiffImagePlugin, features

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
# Those that Pillow may have been built without: how their files begin, and Pillow's and people's
# names for them.
_OPTIONAL = (
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp", "WebP"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "avif", "AVIF"),
    (re.compile(rb"\xff\x4f\xff\x51|....jP  ", re.DOTALL), "jpg_2000", "JPEG 2000"),
)
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# What may become of an EXIF orientation.
EXIF = ("ignore", "apply")
# By EXIF orientation, what makes an image upright.
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Tags of a TIFF.
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_WHITE_IS_ZERO = 0
# A JPEG with a second picture behind it (cameras write them) opens as MPO; decoders see the first.
_JPEG = ("JPEG", "MPO")

# The first bytes of each PNG.
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# What an image that must be encoded can become, with Pillow's options for it.
ENCODINGS = {"jpeg": {"quality": 95, "subsampling": 0}, "png": {}}

# Of a PNG's height and of its width; libpng, with which training decodes, refuses more.
_MOST_ACROSS = 1_000_000
# A JPEG that is to become smaller is decoded at a half, a quarter or an eighth of its size, which
# is cheap, as long as that is at least this many times the new size.
_DECODED_SIZE = 2
# The left, upper, right and lower border of a part of an image, in pixels.
_Box = tuple[float, float, float, float]
# What is to be done with a decoded image.
Seen = Callable[[Image.Image], None]

# Of an object in an error's text: another one each time.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class BadImageError(ValueError):
    """The image cannot be used; the message is the reason, without the image's name."""


class TooManyPixelsError(BadImageError):
    """The image is too large to be decoded."""


class SizeLimit(NamedTuple):
    """The size above which images are made smaller, by one of their sides; both None: none is.

    Attributes:
      max_side: The most pixels of the longer side.
      shorter_side: The most pixels of the shorter side.
    """

    max_side: int | None = None
    shorter_side: int | None = None

    def smaller(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns the width and height, of the same aspect, of an image that is too large."""
        own, most = max(width, height), self.max_side
        if self.shorter_side is not None:
            own, most = min(width, height), self.shorter_side
        if most is None or own <= most:
            return None
        # Of whole numbers, halves up, so that turning an image turns its new size.

        def scaled(side: int) -> int:
            return max(1, (2 * side * most + own) // (2 * own))

        return scaled(width), scaled(height)


NO_LIMIT = SizeLimit()


class EncodedImage(NamedTuple):
    """An image file that training can decode: a JPEG or a PNG, grey or RGB, of 8 bits.

    Attributes:
      data: The file.
      height: In pixels.
      width: In pixels.
      channels: 3 (RGB) or 1 (grey).
      converted_from: What it was made from (``'PNG'``, ``'CMYK JPEG'``, ``'pixels'``) and, behind
        a comma, what else was done (``'JPEG, resized'``), or None for a JPEG that is byte for byte
        the original.
    """

    data: bytes
    height: int
    width: int
    channels: int
    converted_from: str | None


def normalize_encoding(
    data: bytes,
    encoding: str = "jpeg",
    max_pixels: int | None = None,
    size_limit: SizeLimit = NO_LIMIT,
    exif: str = "ignore",
    seen: Seen | None = None,
) -> EncodedImage:
    """Returns an image file as one that training can decode.

    Grey and RGB JPEGs stay as they are, unless they are resized or turned. Other JPEGs (CMYK,
    YCCK), PNG, GIF, BMP, WebP, TIFF, PPM, AVIF and JPEG 2000, whatever they are named, are encoded
    anew, as grey if they were grey, and with 8 bits; what is transparent becomes white. Of several
    frames or pages it is the first one. Comments, colour profiles and other metadata are not
    copied.

    Args:
      data: The image file.
      encoding: What is encoded anew becomes this, of ``ENCODINGS``: ``jpeg``, of quality 95 without
        chroma subsampling, or ``png``, which keeps each pixel.
      max_pixels: The most pixels, height times width, of an image that is decoded; None: as many
        as Pillow allows, 178,956,970.
      size_limit: Images above it are made smaller, with Pillow's bicubic filter, which antialiases,
        and encoded anew. Large JPEGs are decoded at no less than twice the smaller size.
      exif: Of ``EXIF``: ``ignore`` leaves the pixels as they are stored, as ImageNet's own results
        do, ``apply`` turns them as EXIF orientation says and encodes them anew, without it. A
        TIFF's own orientation is applied in any case.
      seen: Called with the image, decoded, in the mode ``L`` or ``RGB``, as it will be stored.

    Raises:
      TooManyPixelsError: It has more.
      BadImageError: The format is none of these, or the pixels cannot all be decoded or encoded.
    """
    if not data:
        raise BadImageError("empty")
    try:
        image = _open(data)
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise TooManyPixelsError(
                f"{image.width} x {image.height} pixels, more than the limit of {max_pixels}"
            )
        size = size_limit.smaller(*image.size)
        box = _draft(image, size) if size else None
        image.load()
        if box is None:
            size = size_limit.smaller(*image.size)  # older Pillows turn a TIFF only now
    except Image.UnidentifiedImageError as error:  # its own message holds a memory address
        raise BadImageError(_unidentified(data)) from error
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"cannot be decoded: {_reason(error)}") from error
    except BadImageError:
        raise
    except Exception as error:  # Pillow lets errors of any class pass where a file is damaged.
        raise BadImageError(f"cannot be decoded: {_reason(error)}") from error
    turn = _turn(image) if exif == "apply" else None
    kind = str(image.format)
    if image.format in _JPEG:
        decodable = image.mode in ("L", "RGB")
        if decodable and not size and turn is None:
            if seen:
                seen(image)
            return EncodedImage(data, image.height, image.width, len(image.getbands()), None)
        kind = "JPEG" if decodable else f"{image.mode} JPEG"
    try:
        image = to_grey_or_rgb(image)
    except Exception as error:
        raise BadImageError(f"cannot become grey or RGB: {_reason(error)}") from error
    return _encode(image, encoding, kind, seen, size, box, turn)


def _draft(image: Image.Image, size: tuple[int, int]) -> _Box | None:
    """Sets a JPEG to be decoded at part of its size, if that is enough for ``size``.

    Returns:
      Where in what is decoded the picture is, which need not fill its last pixels, or None: all.
    """
    width, height = size
    drafted = image.draft(None, (_DECODED_SIZE * width, _DECODED_SIZE * height))
    return drafted[1] if drafted else None


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Returns what makes a loaded image upright, if it is not and its EXIF can be read."""
    if image.format == "TIFF":  # Pillow has done it
        return None
    try:
        return _TURNS.get(image.getexif()[_ORIENTATION])
    except Exception:  # a KeyError, or Pillow's, of any class, where EXIF is damaged
        return None


def _open(data: bytes) -> Image.Image:
    for begin, feature, kind in _OPTIONAL:
        if begin.match(data) and not features.check(feature):
            raise BadImageError(
                f"this Pillow was built without {kind}; install the wheel of pillow>=11.3 from PyPI"
            )
    Image.init()
    # Older ones do not know AVIF by name.
    return Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])


def _unidentified(data: bytes) -> str:
    """Returns why a file is none that Pillow knows."""
    for begin, _, kind in _OPTIONAL:
        if begin.match(data):
            return f"cannot be decoded: damaged {kind}"
    if data.startswith(_TIFF):
        return "cannot be decoded: a damaged TIFF, or one of a kind that Pillow does not read"
    return f"no image of a known format; starts with {data[:4]!r}"


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in the mode ``L`` if it is grey, else ``RGB``, on white if it has alpha.

    Raises:
      ValueError: Its pixels are floats or have 32 bits, or its colours cannot become RGB.
    """
    if image.mode.startswith(("I", "F")):
        return _to_8_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        grey = image.mode in ("LA", "L", "1")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Returns grey of up to 16 bits with the upper 8, where convert("L") would clip at 255."""
    is_tiff = isinstance(image, TiffImagePlugin.TiffImageFile)
    # Pillow has 16 bits of a PNG or PPM as I, too.
    if image.mode == "F" or (is_tiff and image.mode == "I"):
        raise ValueError(
            "its pixels are floats, signed or have 32 bits, and nothing tells which of them are "
            "black and white; convert it to 8 or 16 bits"
        )
    pixels = np.asarray(image).astype(np.int64)
    bits = 16
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2[_BITS_PER_SAMPLE][0]  # 12 are not scaled to 16 by Pillow
        if image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            pixels = 2**bits - 1 - pixels
    return Image.fromarray((pixels >> (bits - 8)).astype(np.uint8))


def encode_pixels(
    pixels: np.ndarray,
    encoding: str = "jpeg",
    size_limit: SizeLimit = NO_LIMIT,
    seen: Seen | None = None,
) -> EncodedImage:
    """Returns raw pixels as an image file.

    Args:
      pixels: uint8 of shape (height, width) for grey, or (height, width, 3) for RGB.
      encoding: As ``normalize_encoding``.
      size_limit: As ``normalize_encoding``.
      seen: Likewise.

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
    image = Image.fromarray(pixels)
    return _encode(image, encoding, "pixels", seen, size_limit.smaller(*image.size))


def _encode(
    image: Image.Image,
    encoding: str,
    kind: str,
    seen: Seen | None,
    size: tuple[int, int] | None = None,
    box: _Box | None = None,
    turn: Image.Transpose | None = None,
) -> EncodedImage:
    """Returns an image as a file.

    Args:
      image: Grey or RGB.
      encoding: Of ``ENCODINGS``.
      kind: What it was.
      seen: As ``normalize_encoding``.
      size: The width and height to make of it; None: its own.
      box: The part of it to make that of; None: all.
      turn: How to turn it, at last.
    """
    if size:
        kind += ", resized"
        try:
            image = image.resize(size, Image.Resampling.BICUBIC, box)
        except Exception as error:
            raise BadImageError(f"cannot be resized: {_reason(error)}") from error
    if turn is not None:
        kind += ", turned"
        image = image.transpose(turn)
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
    if seen:
        seen(image)
    channels = len(image.getbands())
    return EncodedImage(buffer.getvalue(), image.height, image.width, channels, kind)


def _reason(error: Exception) -> str:
    """Returns what an error says, in one line that is always the same, or else its class."""
    text = " ".join(str(error).split())
    return _ADDRESS.sub("", text) or type(error).__name__
