"""What ``prepare`` does to an image file, in a TensorFlow graph, for exported models.

``prepare`` uses Pillow. Here, JPEGs are decoded and encoded by the same library, and the filter
that shrinks images is the same but for rounding. Not here: orientations in PNGs.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from imagenet_fast.data import headers
from imagenet_fast.data.decode import decode_png_on_white
from imagenet_fast.data.images import ENCODINGS
from imagenet_fast.data.preparation import Preparation

# By which libjpeg shrinks while it decodes.
_RATIOS = (1, 2, 4, 8)
# As Pillow's bicubic filter (a = -1/2).
_FILTER = "keyscubic"


def as_in_shard(encoded: tf.Tensor, preparation: Preparation, max_pixels: int) -> tf.Tensor:
    """Returns an image file as ``prepare`` would have stored it.

    Args:
      encoded: bytes of a JPEG or PNG, a string scalar.
      preparation: what to do.
      max_pixels: maximum height times width.

    Returns:
      Bytes of a JPEG or PNG, a string scalar; as given, if ``prepare`` keeps the file, or makes a
      PNG of a PNG.

    Raises:
      tf.errors.InvalidArgumentError: at run time, if it is not a whole JPEG or PNG, or too large.
    """
    if preparation.keeps_jpegs and preparation.encoding == "png":
        return encoded
    encoded, size = headers.check_header(encoded, max_pixels)
    jpeg = headers.is_jpeg(encoded)
    padded = tf.constant(False)
    if preparation.pad_to:
        padded = tf.reduce_max(size) <= preparation.pad_to
        padded &= tf.reduce_min(size) < preparation.pad_to
    new_size = _limited(size, preparation)
    shrunk = tf.reduce_any(new_size < size)
    turn = tf.constant(1)
    if preparation.exif == "apply":
        turn = tf.cond(jpeg, lambda: headers.orientation(encoded), lambda: 1)
    lossy = preparation.encoding == "jpeg"
    changes = padded | shrunk | (turn != 1)
    if lossy:
        of_colours = tf.cond(jpeg, lambda: tf.image.extract_jpeg_shape(encoded)[2], lambda: 3)
        changes |= ~jpeg | (of_colours == 4)

    def change() -> tf.Tensor:
        # As Pillow: of a JPEG that is to be shrunk.
        ratio = tf.where(shrunk & jpeg, _ratio(size, new_size), 0)
        pixels = tf.cond(
            jpeg,
            lambda: _decode_jpeg(encoded, ratio),
            lambda: decode_png_on_white(encoded, tf.concat([[0, 0], size], 0)),
        )
        pixels = tf.cond(padded, lambda: _pad(pixels, size, preparation.pad_to), lambda: pixels)
        # The last row and column may cover a part of a pixel.
        covered = tf.cast(size, tf.float32) / tf.cast(tf.gather(_RATIOS, ratio), tf.float32)
        pixels = tf.cond(shrunk, lambda: _shrink(pixels, covered, new_size), lambda: pixels)
        if preparation.exif == "apply":
            pixels = _turn(pixels, turn)
        if not lossy:
            return tf.io.encode_png(pixels)
        return tf.io.encode_jpeg(
            pixels, quality=ENCODINGS["jpeg"]["quality"], chroma_downsampling=False
        )

    return tf.cond(changes, change, lambda: encoded)


def _limited(size: tf.Tensor, preparation: Preparation) -> tf.Tensor:
    """Returns ``SizeLimit.smaller`` of int32 [height, width], or the size itself."""
    limit = preparation.max_side or preparation.shorter_side
    if limit is None:
        return size
    side = tf.reduce_max(size) if preparation.max_side else tf.reduce_min(size)
    wide, most = tf.cast(size, tf.int64), tf.cast(side, tf.int64)
    scaled = tf.maximum((2 * wide * limit + most) // (2 * most), 1)
    return tf.where(side > limit, tf.cast(scaled, tf.int32), size)


def _ratio(size: tf.Tensor, new_size: tf.Tensor) -> tf.Tensor:
    """Returns the index in ``_RATIOS`` with which Pillow decodes a JPEG that is to be shrunk."""
    most = tf.reduce_min(size // (2 * new_size))
    return tf.reduce_sum(tf.cast(most >= _RATIOS[1:], tf.int32))


def _decode_jpeg(encoded: tf.Tensor, ratio: tf.Tensor) -> tf.Tensor:
    checked = headers.check_scans(encoded)

    def decode(ratio: int) -> tf.Tensor:
        return tf.io.decode_jpeg(checked, 3, ratio, dct_method="INTEGER_ACCURATE")

    return tf.switch_case(ratio, [functools.partial(decode, ratio) for ratio in _RATIOS])


def _pad(pixels: tf.Tensor, size: tf.Tensor, pad_to: int) -> tf.Tensor:
    before = (pad_to - size) // 2
    borders = tf.stack([before, pad_to - size - before], axis=1)
    return tf.pad(pixels, tf.concat([borders, [[0, 0]]], 0))


def _shrink(pixels: tf.Tensor, covered: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Resizes uint8 [height, width, 3]: first the width, and both rounded, as Pillow does."""
    factors = tf.cast(size, tf.float32) / covered
    height = tf.shape(pixels)[0]
    for new, scale in (
        (tf.stack([height, size[1]]), tf.stack([1.0, factors[1]])),
        (size, tf.stack([factors[0], 1.0])),
    ):
        resized = tf.raw_ops.ScaleAndTranslate(
            images=pixels[tf.newaxis],
            size=new,
            scale=scale,
            translation=tf.zeros([2]),
            kernel_type=_FILTER,
            antialias=True,
        )
        pixels = tf.cast(tf.clip_by_value(tf.floor(resized[0] + 0.5), 0, 255), tf.uint8)
    return pixels


def _turn(pixels: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Makes an image upright, by its EXIF orientation from 1 to 8."""
    mirror, flip = functools.partial(tf.reverse, axis=[1]), functools.partial(tf.reverse, axis=[0])

    def transposed() -> tf.Tensor:
        return tf.transpose(pixels, [1, 0, 2])

    turns = (
        lambda: pixels,
        lambda: mirror(pixels),
        lambda: flip(mirror(pixels)),
        lambda: flip(pixels),
        transposed,
        lambda: mirror(transposed()),
        lambda: flip(mirror(transposed())),
        lambda: flip(transposed()),
    )
    return tf.switch_case(orientation - 1, list(turns))
