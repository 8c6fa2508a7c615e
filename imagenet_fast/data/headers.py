"""Image formats and sizes from file headers, in TensorFlow graphs.

No pixels are decoded, so images that are too large, or not JPEG or PNG, are refused before they
take memory.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from imagenet_fast.data.exif import EXIF_BEGIN, LONG, MAX_SEGMENTS, ORIENTATION, SHORT
from imagenet_fast.data.images import BEGIN_OF_SCAN, JPEG_SIGNATURE, MOST_SCANS, PNG_SIGNATURE

# The error of bytes that cannot be decoded.
NO_IMAGE = "not a whole JPEG or PNG image"

# The first chunk of every PNG has 13 bytes, which start with the width and the height.
_PNG_BEGIN = PNG_SIGNATURE + b"\x00\x00\x00\x0dIHDR"
_PADDING = len(_PNG_BEGIN) + 8
# Bytes of a JPEG's segment that tell what it is.
_HEADER = 10
# Version 100, no flags, no colour transform.
_ADOBE_SEGMENT = b"\xff\xee\x00\x0eAdobe\x00\x64" + bytes(5)

# Other formats: offset and signature.
_SIGNATURES = [
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (8, b"WEBP", "WebP"),
    (0, b"II*\x00", "TIFF"),
    (0, b"MM\x00*", "TIFF"),
    (0, b"\x00\x00\x01\x00", "ICO"),
    (4, b"ftyp", "HEIC or AVIF"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    *[(0, b"P%d\n" % number, "PPM") for number in range(1, 8)],
]

# JPEGs that libjpeg-turbo does not decode, by the low four bits of the SOF marker. It does decode
# arithmetic coding, 9 and 10.
_CODINGS = {
    **dict.fromkeys((3, 11), "lossless JPEG"),
    **dict.fromkeys((5, 6, 7, 13, 14, 15), "hierarchical JPEG"),
}
_NOT_SOF = (0xC4, 0xC8, 0xCC)


def is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Returns whether a file, a string scalar, starts like a JPEG: a bool scalar."""
    return tf.strings.substr(encoded, 0, len(JPEG_SIGNATURE)) == JPEG_SIGNATURE


def check_header(encoded: tf.Tensor, max_pixels: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an image that is safe to decode, and its size.

    Args:
      encoded: bytes of the image, a string scalar.
      max_pixels: maximum height times width.

    Returns:
      The bytes, a string scalar, and int32 [height, width]. A CMYK JPEG without information on
      whether its colours are inverted is marked as inverted, which Pillow assumes.

    Raises:
      tf.errors.InvalidArgumentError: in the graph, if it is not a JPEG or PNG or has more pixels.
    """

    def jpeg() -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.image.extract_jpeg_shape(encoded)
        marked = tf.cond(shape[2] == 4, lambda: _marked_as_adobe(encoded), lambda: encoded)
        return marked, shape[:2]

    def png() -> tuple[tf.Tensor, tf.Tensor]:
        begins = tf.strings.substr(encoded, 0, len(_PNG_BEGIN)) == _PNG_BEGIN
        with tf.control_dependencies([tf.debugging.Assert(begins, [NO_IMAGE])]):
            return encoded, _png_size(encoded)

    decodable, size = tf.cond(is_jpeg(encoded), jpeg, png)
    with tf.control_dependencies([tf.debugging.Assert(_fits(size, max_pixels), [size])]):
        return tf.identity(decodable), tf.ensure_shape(tf.identity(size), [2])


def check_scans(jpeg: tf.Tensor) -> tf.Tensor:
    """Returns a JPEG, a string scalar, whose decoding does not take the time of many images.

    Each scan takes that of one. Markers in metadata count, too. For training this search would be
    slow beside decoding.

    Raises:
      tf.errors.InvalidArgumentError: in the graph, if it has more than ``MOST_SCANS`` scans.
    """
    mark = bytes([0xFF, BEGIN_OF_SCAN])
    parts = tf.raw_ops.StringSplitV2(input=[jpeg], sep=mark, maxsplit=MOST_SCANS + 1)
    few = tf.size(parts.values) <= MOST_SCANS + 1
    with tf.control_dependencies([tf.debugging.Assert(few, [f"over {MOST_SCANS} scans"])]):
        return tf.identity(jpeg)


def image_size(encoded: tf.Tensor, max_pixels: int) -> tf.Tensor:
    """Returns int32 [height, width]; arguments and errors are those of :func:`check_header`."""
    return check_header(encoded, max_pixels)[1]


def orientation(jpeg: tf.Tensor) -> tf.Tensor:
    """Returns the EXIF orientation of a JPEG, from 1 to 8; 1 (upright) if there is none.

    Args:
      jpeg: bytes of the file, a string scalar.

    Returns:
      An int32 scalar, that of ``exif.jpeg_orientation``.
    """
    padded = tf.strings.join([jpeg, bytes(_PADDING)])
    place = _place_of_segment(padded, _is_exif)
    segment = _bytes(padded, place, _HEADER)
    size = tf.where(_is_exif(segment), 256 * segment[2] + segment[3] - 2 - len(EXIF_BEGIN), 0)
    tiff = tf.strings.substr(padded, place + 4 + len(EXIF_BEGIN), size)
    value = _orientation_in_tiff(tf.cast(tf.io.decode_raw(tiff, tf.uint8), tf.int64))
    return tf.where((value >= 1) & (value <= 8), tf.cast(value, tf.int32), 1)


def _orientation_in_tiff(data: tf.Tensor) -> tf.Tensor:
    """Returns the first orientation in a TIFF header, whose bytes are int64 [size]; 1: none."""
    end = tf.size(data, tf.int64)
    begin = tf.concat([data, tf.zeros([4], tf.int64)], 0)
    little = tf.reduce_all(begin[:4] == list(b"II*\0"))
    valid = little | tf.reduce_all(begin[:4] == list(b"MM\0*"))

    def number(place: tf.Tensor, size: int) -> tf.Tensor:
        """Returns the unsigned number at each place; bytes behind the end are 0."""
        places = tf.minimum(place[..., tf.newaxis] + tf.range(size, dtype=tf.int64), end)
        weights = tf.constant([256**index for index in range(size)], tf.int64)
        weights = tf.where(little, weights, weights[::-1])
        return tf.reduce_sum(tf.gather(begin, places) * weights, -1)

    directory = number(tf.constant(4, tf.int64), 4)
    count = tf.where(valid, tf.minimum(number(directory, 2), end // 12), 0)
    entries = directory + 2 + 12 * tf.range(count)
    kinds = number(entries + 2, 2)
    values = tf.where(kinds == SHORT, number(entries + 8, 2), number(entries + 8, 4))
    found = (number(entries, 2) == ORIENTATION) & (number(entries + 4, 4) == 1)
    found &= (kinds == SHORT) | (kinds == LONG)
    return tf.concat([tf.boolean_mask(values, found), [1]], 0)[0]


def reason_of_failure(encoded: tf.Tensor, max_pixels: int) -> tf.Tensor:
    """Returns why a file cannot be decoded; raises no errors.

    Args:
      encoded: bytes of the file, a string scalar.
      max_pixels: as for :func:`check_header`.

    Returns:
      The reason, a string scalar: the size if it is too large, the unsupported format or kind of
      JPEG, or ``NO_IMAGE``.
    """
    # Padded, so no read is beyond the end.
    padded = tf.strings.join([encoded, bytes(_PADDING)])

    def png() -> tf.Tensor:
        return _reason_of_size(_png_size(padded), max_pixels)

    def other() -> tf.Tensor:
        reason = tf.constant(NO_IMAGE)
        for place, signature, name in _SIGNATURES:
            matches = tf.strings.substr(padded, place, len(signature)) == signature
            reason = tf.where(matches, _unsupported(name), reason)
        return reason

    begins_as_png = tf.strings.substr(padded, 0, len(_PNG_BEGIN)) == _PNG_BEGIN
    return tf.cond(
        is_jpeg(padded),
        lambda: _reason_of_jpeg(padded, max_pixels),
        lambda: tf.cond(begins_as_png, png, other),
    )


def _marked_as_adobe(jpeg: tf.Tensor) -> tf.Tensor:
    # If the JPEG has such a segment, it comes later and takes precedence.
    soi, rest = tf.strings.substr(jpeg, 0, 2), tf.strings.substr(jpeg, 2, -1)
    return tf.strings.join([soi, _ADOBE_SEGMENT, rest])


def _png_size(png: tf.Tensor) -> tf.Tensor:
    """Returns int32 [height, width], negative for sizes of 2**31 or more."""
    size = tf.strings.substr(png, len(_PNG_BEGIN), 8)
    return tf.reverse(tf.io.decode_raw(size, tf.int32, little_endian=False), [0])


def _fits(size: tf.Tensor, max_pixels: int) -> tf.Tensor:
    product = tf.reduce_prod(tf.cast(size, tf.int64))
    return tf.reduce_all(size > 0) & (product <= max_pixels)


def _reason_of_size(size: tf.Tensor, max_pixels: int) -> tf.Tensor:
    numbers = tf.strings.as_string(tf.cast(tf.bitcast(size, tf.uint32), tf.int64))
    text = [numbers[1], " x ", numbers[0], f" pixels, more than the limit of {max_pixels}"]
    too_large = ~_fits(size, max_pixels) & tf.reduce_all(size != 0)
    return tf.where(too_large, tf.strings.join(text), NO_IMAGE)


def _reason_of_jpeg(padded: tf.Tensor, max_pixels: int) -> tf.Tensor:
    sof = _bytes(padded, _place_of_segment(padded, _is_sof), _HEADER)
    height, width = 256 * sof[5] + sof[6], 256 * sof[7] + sof[8]
    precision, components = sof[4], sof[9]
    codings = tf.constant([_unsupported(_CODINGS[n]) if n in _CODINGS else "" for n in range(16)])
    coding = tf.gather(codings, sof[1] % 16)
    count = tf.strings.as_string(components)
    channels = tf.strings.join(["JPEG of ", count, _unsupported(" components")])
    reason = _reason_of_size(tf.stack([height, width]), max_pixels)
    reason = tf.where(tf.reduce_any(components == [0, 1, 3, 4]), reason, channels)
    reason = tf.where(precision == 12, _unsupported("12-bit JPEG"), reason)
    reason = tf.where(coding == "", reason, coding)
    return tf.where(_is_sof(sof), reason, NO_IMAGE)


def _place_of_segment(padded: tf.Tensor, is_wanted: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Returns the offset of a JPEG's first such segment, or another offset if there is none.

    ``padded`` has ``_PADDING`` zeros at its end; ``is_wanted`` tells it by its first bytes, int32
    [_HEADER].
    """
    end = tf.strings.length(padded) - _PADDING

    def is_before(place: tf.Tensor) -> tf.Tensor:
        segment = _bytes(padded, place, _HEADER)
        is_end = tf.reduce_any(segment[1] == [0xD9, 0xDA])
        return (segment[0] == 0xFF) & ~is_wanted(segment) & ~is_end

    def step(place: tf.Tensor) -> tuple[tf.Tensor]:
        segment = _bytes(padded, place, 4)
        length = tf.maximum(256 * segment[2] + segment[3], 2)
        # A marker may be preceded by any number of bytes of 255.
        forward = tf.where(segment[1] == 0xFF, 1, 2 + length)
        return (tf.minimum(place + forward, end),)

    (place,) = tf.while_loop(is_before, step, (2,), maximum_iterations=MAX_SEGMENTS)
    return place


def _is_exif(segment: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(segment[:2] == [0xFF, 0xE1]) & tf.reduce_all(
        segment[4:] == list(EXIF_BEGIN)
    )


def _is_sof(segment: tf.Tensor) -> tf.Tensor:
    marker = segment[1]
    is_sof = (marker >= 0xC0) & (marker <= 0xCF) & tf.reduce_all(marker != _NOT_SOF)
    return (segment[0] == 0xFF) & is_sof


def _bytes(text: tf.Tensor, place: tf.Tensor, count: int) -> tf.Tensor:
    raw = tf.io.decode_raw(tf.strings.substr(text, place, count), tf.uint8)
    return tf.ensure_shape(tf.cast(raw, tf.int32), [count])


def _unsupported(kind: str) -> str:
    return f"{kind} cannot be decoded: convert it to a baseline JPEG or to PNG"
