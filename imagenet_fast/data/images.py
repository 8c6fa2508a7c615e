"""Checking of image files, and their conversion to JPEGs and PNGs that training can decode.

Every image is decoded completely once, before training: later, training decodes only a crop of a
JPEG (``tf.image.decode_and_crop_jpeg``), and would notice damage only there.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, TiffImagePlugin, features

from imagenet_fast.data.exif import ORIENTATION, jpeg_orientation

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
# Formats that Pillow may have been built without: the start of their files, Pillow's name of the
# feature, and the usual name.
_OPTIONAL = (
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp", "WebP"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "avif", "AVIF"),
    (re.compile(rb"\xff\x4f\xff\x51|....jP  ", re.DOTALL), "jpg_2000", "JPEG 2000"),
)
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Choices for EXIF orientation.
EXIF = ("ignore", "apply")
# By EXIF orientation: the transposition that makes the image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# TIFF tags.
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_WHITE_IS_ZERO = 0
# Cameras append second pictures to JPEGs, which Pillow opens as MPO; decoders read the first.
_JPEG = ("JPEG", "MPO")

# The first bytes of every JPEG and of every PNG.
JPEG_SIGNATURE = b"\xff\xd8\xff"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A marker with a segment, or the end of the image; not those within a scan.
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]", re.DOTALL)
_END_OF_IMAGE, BEGIN_OF_SCAN = 0xD9, 0xDA
MOST_SCANS = 500

# Images whose conversion takes more memory are refused: some of 2 kB would take 3 GB.
_MOST_MEMORY = 2**30
# Those that take more than this are converted one at a time.
_MUCH_MEMORY = 2**28
ONE_AT_A_TIME = threading.RLock()
_MOST_SEGMENTS = 2**16  # of a JPEG
_TILE = (322, 323)  # tags of a TIFF: its tiles' width and length
# Bytes per pixel that decoders take beside the image (libtiff: of one strip).
_DECODERS = {"JPEG2000": 16, "AVIF": 14, "WEBP": 12, "TIFF": 4}
# Of JPEGs of several scans, whose coefficients have 16 bits.
_BYTES_OF_COEFFICIENT = 2
# Converted at a time, so that the copies that this takes are small.
_PIXELS_AT_ONCE = 2**20

# The formats for re-encoded images, with Pillow's options.
ENCODINGS = {"jpeg": {"quality": 95, "subsampling": 0}, "png": {}}

# The largest height and width of PNGs that libpng, which training uses, decodes.
_MAX_PNG_SIDE = 1_000_000
# JPEGs to be shrunk are decoded at 1/2, 1/4 or 1/8 of their size, which is cheap, if that is at
# least this many times the new size.
_MIN_DRAFT_RATIO = 2
# Left, upper, right and lower, in pixels.
_Box = tuple[float, float, float, float]

# The address of an object in an error's text, which differs each time.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class BadImageError(ValueError):
    """An image cannot be used; the message is the reason, without the image's name."""


class UnknownFormatError(BadImageError):
    """A file is no image of a format that Pillow recognizes."""


class TooManyPixelsError(BadImageError):
    """An image is too large to be decoded."""


class SizeLimit(NamedTuple):
    """The size above which images are shrunk, by one of their sides; by default no limit."""

    max_side: int | None = None  # the largest longer side, in pixels
    shorter_side: int | None = None  # the largest shorter side, in pixels

    def smaller(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns the width and height to shrink an image to, or None if it is within the limit."""
        side, limit = max(width, height), self.max_side
        if self.shorter_side is not None:
            side, limit = min(width, height), self.shorter_side
        if limit is None or side <= limit:
            return None

        # Integer arithmetic, halves up, so that turning an image turns its new size.
        def scaled(length: int) -> int:
            return max(1, (2 * length * limit + side) // (2 * side))

        return scaled(width), scaled(height)


NO_LIMIT = SizeLimit()


class EncodedImage(NamedTuple):
    """An image file that training can decode: an 8-bit JPEG or PNG, greyscale or RGB.

    Attributes:
      data: the file.
      height: in pixels.
      width: in pixels.
      channels: 3 (RGB) or 1 (greyscale).
      converted_from: the original format (``'PNG'``, ``'CMYK JPEG'``, ``'pixels'``) and further
        changes (``'JPEG, resized'``), or None for a JPEG that is byte for byte the original.
      pixels: the decoded image, in the mode ``L`` or ``RGB``, before it was re-encoded.
    """

    data: bytes
    height: int
    width: int
    channels: int
    converted_from: str | None
    pixels: Image.Image


def normalize_encoding(
    data: bytes,
    encoding: str = "jpeg",
    max_pixels: int | None = None,
    size_limit: SizeLimit = NO_LIMIT,
    exif: str = "ignore",
    pad_to: int = 0,
    one_at_a_time: AbstractContextManager[Any] = ONE_AT_A_TIME,
) -> EncodedImage:
    """Converts an image file to one that training can decode.

    Greyscale and RGB JPEGs stay unchanged, unless they are resized or turned. CMYK and YCCK JPEGs,
    PNG, GIF, BMP, WebP, TIFF, PPM, AVIF and JPEG 2000 are re-encoded with 8 bits, as greyscale if
    they were; the format is that of the content, not of the name. Transparent pixels become white.
    Of several frames or pages the first is used. Comments, colour profiles and other metadata are
    not copied.

    Args:
      data: the image file.
      encoding: the format of re-encoded images, from ``ENCODINGS``: ``jpeg`` (quality 95, no chroma
        subsampling) or ``png`` (lossless).
      max_pixels: the largest height times width to decode; None: Pillow's limit, 178,956,970.
      size_limit: images above it are shrunk by Pillow's antialiased bicubic filter and re-encoded.
        Large JPEGs are decoded at a fraction of their size, but at least twice the new size.
      exif: from ``EXIF``: ``ignore`` keeps the pixels as stored, as published ImageNet results do;
        ``apply`` turns them by the EXIF orientation and re-encodes them. A TIFF's own orientation
        is always applied.
      pad_to: images of at most this height and width are padded with zeros to both, and re-encoded;
        an odd pixel is added at the bottom or right. Not with ``size_limit``.
      one_at_a_time: a lock that is held while an image is converted that takes over 256 MiB of
        memory; by default one of this process.

    Raises:
      TooManyPixelsError: it has more than ``max_pixels``, or its conversion takes over 1 GiB of
        memory.
      BadImageError: the format is not one of these, or it cannot be decoded or encoded completely.
    """
    if not data:
        raise BadImageError("empty")
    # Each scan takes the time of a whole image.
    scans = _count_scans(data) if data.startswith(JPEG_SIGNATURE) else 1
    if scans > MOST_SCANS:
        raise BadImageError(f"a JPEG of more than {MOST_SCANS} scans")
    with _explained(data):
        image = _open(data)
        width, height = image.size
        if max_pixels is not None and width * height > max_pixels:
            raise TooManyPixelsError(
                f"{width} x {height} pixels, more than the limit of {max_pixels}"
            )
        size = size_limit.smaller(width, height)
        box = None  # the part that the image covers of pixels decoded at a fraction of its size
        if size:
            drafted = image.draft(None, (_MIN_DRAFT_RATIO * size[0], _MIN_DRAFT_RATIO * size[1]))
            box = drafted[1] if drafted else None
        memory = _memory(image, size, exif == "apply")
        if scans > 1:
            memory += _BYTES_OF_COEFFICIENT * width * height * len(image.getbands())
        if memory > _MOST_MEMORY:
            raise TooManyPixelsError(
                f"{width} x {height} pixels, whose conversion would take {memory / 2**30:.1f} GiB "
                "of memory, more than the limit of 1"
            )
    with one_at_a_time if memory > _MUCH_MEMORY else nullcontext():
        with _explained(data):
            image.load()
        if box is None:  # older versions of Pillow turn a TIFF only when it is loaded
            size = size_limit.smaller(*image.size)
        turn = _turn(image, data) if exif == "apply" else None
        padded = max(image.size) <= pad_to and min(image.size) < pad_to
        kind = str(image.format)
        if image.format in _JPEG:
            decodable = image.mode in ("L", "RGB")
            if decodable and not size and not padded and turn is None:
                channels = len(image.getbands())
                return EncodedImage(data, image.height, image.width, channels, None, image)
            kind = "JPEG" if decodable else f"{image.mode} JPEG"
        try:
            image = to_grey_or_rgb(image)
        except Exception as error:
            raise BadImageError(
                f"cannot be converted to greyscale or RGB: {_reason(error)}"
            ) from error
        if padded:
            kind += ", padded"
            left, top = ((pad_to - side) // 2 for side in image.size)
            image = image.crop((-left, -top, pad_to - left, pad_to - top))
        return _encode(image, encoding, kind, size, box, turn)


def _count_scans(jpeg: bytes) -> int:
    """Returns the number of scans in a JPEG; those of previews in its metadata do not count.

    Raises:
      BadImageError: it has so many segments that searching them would take long.
    """
    scans = 0
    place = len(JPEG_SIGNATURE) - 1
    for _ in range(_MOST_SEGMENTS):
        found = _MARKER.search(jpeg, place)
        if not found or jpeg[found.start() + 1] == _END_OF_IMAGE:
            return scans
        scans += jpeg[found.start() + 1] == BEGIN_OF_SCAN
        place = found.end() + int.from_bytes(jpeg[found.end() : found.end() + 2], "big")
    raise BadImageError(f"a JPEG of more than {_MOST_SEGMENTS:,} segments")


def _memory(image: Image.Image, size: tuple[int, int] | None, turned: bool) -> int:
    """Returns how many bytes it takes at most to decode and convert an opened image.

    Args:
      image: as opened, of the size that it will be decoded at.
      size: the width and height to resize it to; None: do not resize.
      turned: whether it may be turned.
    """
    grey = image.mode in ("1", "L", "LA") or image.mode.startswith("I")
    result = 1 if grey else 4
    kept = image.mode in ("L", "RGB") and "transparency" not in image.info
    decoded = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;") else 4
    decoded += _DECODERS.get(str(image.format), 0)
    a_pixel = decoded + (0 if kept else result) + (result if turned else 0)
    memory = a_pixel * max(image.width * image.height, _pixels_of_tile(image))
    if size:
        memory += result * size[0] * (image.height + size[1])  # Pillow resizes rows, then columns
    return memory


def _pixels_of_tile(image: Image.Image) -> int:
    """Returns the pixels of a TIFF's tile, which may be larger than the image; else 0."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return 0
    width, length = (image.tag_v2.get(tag) for tag in _TILE)
    return width * length if isinstance(width, int) and isinstance(length, int) else 0


@contextmanager
def _explained(data: bytes) -> Iterator[None]:
    """Makes what Pillow raises while it opens or decodes ``data`` a ``BadImageError``."""
    try:
        yield
    except Image.UnidentifiedImageError as error:  # its message contains a memory address
        raise _unidentified(data) from error
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"cannot be decoded: {_reason(error)}") from error
    except BadImageError:
        raise
    except Exception as error:  # of any class: Pillow's decoders raise what they like
        raise BadImageError(f"cannot be decoded: {_reason(error)}") from error


def _turn(image: Image.Image, data: bytes) -> Image.Transpose | None:
    """Returns the transposition that makes an image upright; None if there is no readable EXIF."""
    if image.format == "TIFF":  # Pillow applies its orientation
        return None
    if image.format in _JPEG:
        return _TURNS.get(jpeg_orientation(data))
    try:
        return _TURNS.get(image.getexif()[ORIENTATION])
    except Exception:  # a KeyError, or any class where EXIF is damaged
        return None


def _open(data: bytes) -> Image.Image:
    for begin, feature, kind in _OPTIONAL:
        if begin.match(data) and not features.check(feature):
            raise BadImageError(
                f"this Pillow was built without {kind}; install the wheel of pillow>=11.3 from PyPI"
            )
    Image.init()
    # Older versions of Pillow do not have all of these formats.
    return Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])


def _unidentified(data: bytes) -> BadImageError:
    """Returns the error for a file that Pillow does not recognize."""
    for begin, _, kind in _OPTIONAL:
        if begin.match(data):
            return BadImageError(f"cannot be decoded: damaged {kind}")
    if data.startswith(_TIFF):
        return BadImageError(
            "cannot be decoded: a damaged TIFF, or of a kind that Pillow does not read"
        )
    return UnknownFormatError(f"not an image of a known format; starts with {data[:4]!r}")


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in the mode ``L`` or ``RGB``, with alpha blended with white.

    Raises:
      ValueError: its pixels are floats or have 32 bits, or it cannot be converted to RGB.
    """
    if image.mode.startswith(("I", "F")):
        return _by_rows(image, "L", _to_8_bits(image))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        mode = "L" if image.mode in ("LA", "L", "1") else "RGB"
        return _by_rows(image, mode, lambda rows: _on_white(rows).convert(mode))
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _by_rows(
    image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    """Returns an image of this mode, of which ``convert`` makes some rows at a time."""
    image.load()
    converted = Image.new(mode, image.size)
    width, height = image.size
    rows = max(_PIXELS_AT_ONCE // width, 1)
    for top in range(0, height, rows):
        part = image.crop((0, top, width, min(top + rows, height)))
        converted.paste(convert(part), (0, top))
    return converted


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _to_8_bits(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Returns what takes the upper 8 bits of rows of a greyscale image of up to 16 bits.

    convert("L") would clip at 255.
    """
    is_tiff = isinstance(image, TiffImagePlugin.TiffImageFile)
    # Pillow opens PNGs and PPMs of 16 bits in the mode I, too.
    if image.mode == "F" or (is_tiff and image.mode == "I"):
        raise ValueError(
            "its pixels are floats, signed or have 32 bits, so that the values of black and white "
            "are unknown; convert it to 8 or 16 bits"
        )
    bits, inverted = 16, False
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2[_BITS_PER_SAMPLE][0]  # Pillow does not scale 12 bits to 16
        inverted = image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO

    def convert(rows: Image.Image) -> Image.Image:
        pixels = np.asarray(rows)
        if inverted:
            pixels = 2**bits - 1 - pixels
        return Image.fromarray((pixels >> (bits - 8)).astype(np.uint8))

    return convert


def encode_pixels(
    pixels: np.ndarray, encoding: str = "jpeg", size_limit: SizeLimit = NO_LIMIT
) -> EncodedImage:
    """Encodes raw pixels as an image file; see ``normalize_encoding``.

    They are uint8 of shape (height, width) for greyscale, or (height, width, 3) for RGB.

    Raises:
      BadImageError: they cannot be encoded.
      ValueError: another shape or dtype.
    """
    grey_or_rgb = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)
    if pixels.dtype != np.uint8 or not grey_or_rgb or not pixels.size:
        raise ValueError(
            "pixels must be uint8 of shape (height, width) or (height, width, 3), "
            f"not {pixels.dtype} of shape {pixels.shape}"
        )
    image = Image.fromarray(pixels)
    return _encode(image, encoding, "pixels", size_limit.smaller(*image.size))


def _encode(
    image: Image.Image,
    encoding: str,
    kind: str,
    size: tuple[int, int] | None = None,
    box: _Box | None = None,
    turn: Image.Transpose | None = None,
) -> EncodedImage:
    """Resizes, turns and encodes an image.

    Args:
      image: in the mode ``L`` or ``RGB``.
      encoding: from ``ENCODINGS``.
      kind: the original format.
      size: the width and height to resize it to; None: do not resize.
      box: the part to resize; None: all.
      turn: a transposition to apply after resizing.
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
    # Pillow would copy comments and the colour profile, and fail if they are long or damaged.
    image.info.clear()
    buffer = io.BytesIO()
    try:
        if encoding == "png" and max(image.size) > _MAX_PNG_SIDE:
            raise ValueError(f"training cannot decode sides above {_MAX_PNG_SIDE}")
        image.save(buffer, encoding, **ENCODINGS[encoding])
    except Exception as error:  # as of JPEGs with a side above 65500 pixels
        raise BadImageError(
            f"{image.width} x {image.height} pixels cannot be encoded as {encoding}: "
            f"{_reason(error)}"
        ) from error
    channels = len(image.getbands())
    return EncodedImage(buffer.getvalue(), image.height, image.width, channels, kind, image)


def _reason(error: Exception) -> str:
    """Returns an error's message as one reproducible line, or its class if it has none."""
    text = " ".join(str(error).split())
    return _ADDRESS.sub("", text) or type(error).__name__
