"""From encoded images to uint8 pixels of the size that the model sees, inside a TensorFlow graph.

Where training crops at random, the windows of a whole batch are drawn at once, from the sizes of
the images alone. JPEGs are decoded only where the window lies (``decode_and_crop_jpeg``); PNG, GIF
and BMP are decoded whole. Grey images get three equal channels. Pixels are rounded to uint8 after
resizing, as PIL does, so that a quarter of the bytes goes to the accelerator.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.data import draws, resize_op
from imagenet_fast.data.augment import mirror
from imagenet_fast.data.images import PNG_SIGNATURE

# Width by height: of a random_resized crop the root of this, of an inception crop this itself.
_RATIOS = (3 / 4, 4 / 3)
# Of the image, by an inception crop.
_LEAST_SHOWN = 0.1
_DCT_METHODS = {"accurate": "INTEGER_ACCURATE", "fast": "INTEGER_FAST"}
# By which a JPEG can be decoded smaller.
_JPEG_RATIOS = (1, 2, 4, 8)


def training_windows(sizes: tf.Tensor, identities: tf.Tensor, config: Config) -> tf.Tensor:
    """Draws the windows of training images, as ``config.train_crop`` says.

    Args:
      sizes: int32 [images, 2]: their heights and widths.
      identities: int64 [images, 3], as :func:`draws.uniform` takes them.
      config: gives ``train_crop`` and its options.

    Returns:
      int32 [images, 4]: top, left, height and width of each.
    """
    draw_windows = _DRAW_WINDOWS.get(config.train_crop)
    if not draw_windows:
        return evaluation_windows(sizes, config)
    numbers = draws.uniform(identities, "crop", 5 * config.crop_attempts)
    numbers = tf.reshape(numbers, [-1, 5, config.crop_attempts])
    return draw_windows(sizes, tf.unstack(numbers, axis=1), config)


def evaluation_windows(sizes: tf.Tensor, config: Config) -> tf.Tensor:
    """Returns the windows in the middle that evaluation sees: like :func:`training_windows`."""
    return _centre_windows(sizes, config.eval_crop_fraction)


def window_image(
    encoded: tf.Tensor, window: tf.Tensor, config: Config, mirrored: tf.Tensor | None = None
) -> tf.Tensor:
    """Decodes a window of an image and resizes it.

    Args:
      encoded: bytes of the image, a string scalar.
      window: int32 [4]: top, left, height, width.
      config: gives ``image_size``, ``resize_method`` and ``resize_kernel``.
      mirrored: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    return resize(decode_window(encoded, window, config), config, mirrored)


def evaluation_image(encoded: tf.Tensor, config: Config) -> tf.Tensor:
    """Decodes an image and takes its centre, as evaluation does, but by TensorFlow's ops alone.

    The image may come from anywhere: what is transparent in a PNG becomes white, as it does in
    ``imagenet-fast prepare``, for which reason training need not look for it.

    Args:
      encoded: bytes of the image, a string scalar.
      config: gives ``eval_crop_fraction``, ``image_size`` and ``resize_method``.

    Returns:
      uint8 [image_size, image_size, 3].
    """

    def centre(size: tf.Tensor) -> tf.Tensor:
        return evaluation_windows(size[tf.newaxis, :2], config)[0]

    def jpeg() -> tf.Tensor:
        return _decode_jpeg(encoded, centre(tf.image.extract_jpeg_shape(encoded)), config)

    def other() -> tf.Tensor:
        image = tf.cond(
            tf.strings.substr(encoded, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE,
            lambda: _decode_png_on_white(encoded),
            lambda: _decode_whole(encoded),
        )
        return _cut(image, centre(tf.shape(image)))

    image = tf.cond(_is_jpeg(encoded), jpeg, other)
    return resize(image, config.replace(resize_kernel="tensorflow"))


def image_size(encoded: tf.Tensor) -> tf.Tensor:
    """Returns int32 [height, width], from the header alone if the image is a JPEG."""
    size = tf.cond(
        _is_jpeg(encoded),
        lambda: tf.image.extract_jpeg_shape(encoded)[:2],
        lambda: tf.shape(_decode_whole(encoded))[:2],
    )
    return tf.ensure_shape(size, [2])


def _is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, 3) == b"\xff\xd8\xff"


def decode_window(encoded: tf.Tensor, window: tf.Tensor, config: Config) -> tf.Tensor:
    """Returns uint8 [height, width, 3] of ``window``, or a fraction of it that is large enough."""
    return tf.cond(
        _is_jpeg(encoded),
        lambda: _decode_jpeg(encoded, window, config),
        lambda: _cut(_decode_whole(encoded), window),
    )


def _decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _decode_png_on_white(encoded: tf.Tensor) -> tf.Tensor:
    pixels = tf.cast(tf.io.decode_png(encoded, channels=4), tf.int32)
    colours, alpha = pixels[..., :3], pixels[..., 3:]
    # The alpha that TensorFlow adds to pixels of 1, 2 or 4 bits is the greatest of so many bits.
    bits = tf.io.decode_raw(tf.strings.substr(encoded, 24, 1), tf.uint8)[0]
    opaque = tf.reduce_all(alpha == 2 ** tf.cast(bits, tf.int32) - 1)
    alpha = tf.where(opaque, 255, alpha)
    # To the nearest, as Pillow does.
    return tf.cast((colours * alpha + 255 * (255 - alpha) + 127) // 255, tf.uint8)


def _cut(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    return tf.slice(image, [window[0], window[1], 0], [window[2], window[3], 3])


def _decode_jpeg(encoded: tf.Tensor, window: tf.Tensor, config: Config) -> tf.Tensor:
    def decode_at(ratio: int) -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(
            encoded,
            window if ratio == 1 else _scaled(window, ratio),
            channels=3,
            ratio=ratio,
            fancy_upscaling=config.jpeg_upsampling == "smooth",
            dct_method=_DCT_METHODS[config.jpeg_dct],
        )

    if not config.jpeg_scaling:
        return decode_at(1)
    enough = tf.reduce_min(window[2:]) // config.image_size
    branches = [functools.partial(decode_at, ratio) for ratio in _JPEG_RATIOS]
    largest = tf.reduce_sum(tf.cast(enough >= _JPEG_RATIOS[1:], tf.int32))
    return tf.switch_case(largest, branches)


def _scaled(window: tf.Tensor, ratio: int) -> tf.Tensor:
    """Returns a window in pixels of a smaller image, its edges rounded to the nearest."""
    first = (window[:2] + ratio // 2) // ratio
    last = (window[:2] + window[2:] + ratio // 2) // ratio
    return tf.concat([first, last - first], 0)


def _random_resized_windows(
    sizes: tf.Tensor, numbers: list[tf.Tensor], config: Config
) -> tf.Tensor:
    """Draws windows as fb.resnet.torch does, on which Goyal et al. 2017 build.

    The area is a uniform fraction of the image; the *root* of the ratio of width to height is
    uniform in [3/4, 4/3], or of height to width, with even odds. The first of
    ``config.crop_attempts`` windows that fits is taken; if none does, the largest square in the
    middle.

    Args:
      sizes: int32 [images, 2].
      numbers: five of float32 [images, attempts].
      config: gives ``crop_min_area``.
    """
    areas, ratios, turns, tops, lefts = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    fraction = config.crop_min_area + (1 - config.crop_min_area) * areas
    side = tf.sqrt(fraction * height * width)
    low, high = _RATIOS
    ratio = low + (high - low) * ratios
    wide, narrow = tf.round(side * ratio), tf.round(side / ratio)
    turned = turns < 0.5
    heights = tf.maximum(tf.where(turned, wide, narrow), 1)
    widths = tf.maximum(tf.where(turned, narrow, wide), 1)
    fits = tf.logical_and(heights <= height, widths <= width)
    windows = _placed(height, width, heights, widths, tops, lefts)
    return _first_that_fits(windows, fits, _centre_windows(sizes, 1.0))


def _inception_windows(sizes: tf.Tensor, numbers: list[tf.Tensor], config: Config) -> tf.Tensor:
    """Draws windows as Google's code for TPUs does, and MLPerf's reference code.

    The algorithm is that of TensorFlow's ``sample_distorted_bounding_box``, for all images at once.
    The ratio of width to height is uniform in [3/4, 4/3] (MLPerf's: 1.33), and so is the height
    between its bounds, which makes small areas more likely than large ones. Windows below a tenth
    of the image fail, whatever ``config.crop_min_area``: that code wants to see a tenth of an
    object, and takes the whole image for the object (MLPerf's: where none is marked). If all of
    ``config.crop_attempts`` fail, evaluation's window is taken (MLPerf's: the whole image).

    Args:
      sizes: int32 [images, 2].
      numbers: five of float32 [images, attempts], of which four serve.
      config: gives ``crop_min_area`` and ``eval_crop_fraction``.
    """
    ratios, shares, tops, lefts, _ = numbers
    height, width = tf.unstack(tf.cast(sizes[:, tf.newaxis], tf.float32), axis=-1)
    least, most = config.crop_min_area * height * width, height * width
    low, high = _RATIOS
    ratio = low + (high - low) * ratios
    lowest = tf.round(tf.sqrt(least / ratio))
    highest = tf.round(tf.sqrt(most / ratio))
    widest = tf.floor((width + 0.5 - 1e-7) / ratio)
    widest -= tf.cast(tf.round(widest * ratio) > width, tf.float32)
    highest = tf.where(tf.round(highest * ratio) > width, widest, highest)
    highest = tf.minimum(highest, height)
    lowest = tf.minimum(lowest, highest)
    heights = lowest + tf.floor(shares * (highest - lowest + 1))
    # Rounding may have left the bounds.
    heights += tf.cast(heights * tf.round(heights * ratio) < least, tf.float32)
    heights -= tf.cast(heights * tf.round(heights * ratio) > most, tf.float32)
    widths = tf.round(heights * ratio)
    areas = heights * widths
    within = tf.logical_and(heights <= height, widths <= width)
    allowed = tf.logical_and(areas >= tf.maximum(least, _LEAST_SHOWN * most), areas <= most)
    seen = tf.logical_and(heights >= 1, widths >= 1)
    windows = _placed(height, width, heights, widths, tops, lefts)
    fallback = evaluation_windows(sizes, config)
    chosen = _first_that_fits(windows, within & allowed & seen, fallback)
    # As Google's code does, which knows of no other sign of failure than the whole image.
    failed = tf.reduce_all(chosen[:, 2:] == sizes, axis=1, keepdims=True)
    return tf.where(failed, fallback, chosen)


_DRAW_WINDOWS = {"random_resized": _random_resized_windows, "inception": _inception_windows}


def _placed(
    height: tf.Tensor,
    width: tf.Tensor,
    heights: tf.Tensor,
    widths: tf.Tensor,
    tops: tf.Tensor,
    lefts: tf.Tensor,
) -> tf.Tensor:
    """Returns windows int32 [images, attempts, 4] at places that are uniform in [0, 1)."""
    top = tf.floor(tops * (height - heights + 1))
    left = tf.floor(lefts * (width - widths + 1))
    return tf.cast(tf.stack([top, left, heights, widths], axis=-1), tf.int32)


def _first_that_fits(windows: tf.Tensor, fits: tf.Tensor, fallback: tf.Tensor) -> tf.Tensor:
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1)
    chosen = tf.gather(windows, first, axis=1, batch_dims=1)
    return tf.where(tf.reduce_any(fits, axis=1, keepdims=True), chosen, fallback)


def _centre_windows(sizes: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the squares in the middle, ``fraction`` of the shorter side wide."""
    shorter = tf.cast(tf.reduce_min(sizes, axis=1, keepdims=True), tf.float32)
    side = tf.maximum(tf.cast(tf.round(fraction * shorter), tf.int32), 1)
    corners = (sizes - side + 1) // 2
    return tf.concat([corners, side, side], axis=1)


def resize(image: tf.Tensor, config: Config, mirrored: tf.Tensor | None = None) -> tf.Tensor:
    """Resizes an image.

    Args:
      image: uint8 [height, width, 3].
      config: gives ``image_size``, ``resize_method`` and ``resize_kernel``, of which ``auto`` is
        TensorFlow's here: see :func:`resize_op.with_resize_kernel`.
      mirrored: bool scalar: whether left and right change places.

    Returns:
      uint8 [image_size, image_size, 3].
    """
    if config.resize_kernel == "native":
        sides = False if mirrored is None else mirrored
        return resize_op.resize(image, config.image_size, config.resize_method, sides)
    size = [config.image_size, config.image_size]
    resized = tf.image.resize(image, size, method=config.resize_method) + 0.5
    if config.resize_method == "bicubic":  # which overshoots at edges
        resized = tf.clip_by_value(resized, 0.0, 255.0)
    resized = tf.ensure_shape(tf.cast(resized, tf.uint8), [*size, 3])
    return resized if mirrored is None else mirror(resized, mirrored)
