"""Evaluation's preprocessing with Pillow and NumPy only, for exported ONNX and TFLite models.

They are used without TensorFlow, and take resized pixels, for the reasons in
:mod:`~imagenet_fast.serving.convert`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.images import to_grey_or_rgb
from imagenet_fast.data.preparation import Preparation

# TensorFlow's table of the cubic kernel has this many entries per pixel.
_CUBIC_STEPS = 1024
# Those of prepare_image that are options of a run, and their names there.
ARGUMENTS = {
    "size": "image_size",
    "crop_fraction": "eval_crop_fraction",
    "crop": "eval_crop",
    "resize_method": "resize_method",
    "antialias": "antialias",
}


def prepare_image(
    encoded: bytes,
    size: int,
    crop_fraction: float = 0.875,
    resize_method: str = "bilinear",
    antialias: bool = False,
    crop: str = "square",
    as_in_shards: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Decodes an image, and crops and resizes its center.

    As in the data that ``imagenet-fast prepare`` writes, transparent pixels become white, and 16
    bits become 8.

    Pixels are those of evaluation. A few differ by 1 of 255, by rounding; at the crop's border, a
    JPEG's subsampled colours differ by a few.

    Args:
      encoded: bytes of a JPEG, a PNG, or another format that Pillow reads.
      size: height and width of the result, in pixels.
      crop_fraction: side of the centre crop, as a fraction of the image's.
      resize_method: ``bilinear`` or ``bicubic``.
      antialias: whether to antialias when downsizing.
      crop: ``square``, of the fraction of the shorter side, or ``proportional``, of both sides.
      as_in_shards: what ``imagenet-fast prepare`` did to the images of training, such as ``exif``;
        the same is done to this one; None: nothing.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UserError: if Pillow cannot read the image, or there is no such crop.
    """
    if crop not in ("square", "proportional"):
        raise UserError(f"there is no crop {crop!r}: it is square or proportional")
    try:
        if as_in_shards is not None:
            encoded = Preparation.of(as_in_shards).encoded(encoded).data
        image = to_grey_or_rgb(Image.open(io.BytesIO(encoded))).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"not a whole image: {error}") from None
    if crop == "proportional":
        left, top = (int((length - length * crop_fraction) / 2) for length in image.size)
        width, height = image.width - 2 * left, image.height - 2 * top
    else:
        side = np.rint(np.float32(crop_fraction) * np.float32(min(image.size)))
        width = height = max(int(side), 1)
        left, top = ((length - width + 1) // 2 for length in image.size)
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32)
    if antialias:
        pixels = _resize_antialiased(pixels, size, resize_method)
    else:
        for _ in range(2):  # height, then width
            pixels = _resize_height(pixels, size, resize_method).swapaxes(0, 1)
    # Cubic interpolation overshoots at edges.
    return np.clip(pixels + 0.5, 0, 255).astype(np.uint8)


def _resize_antialiased(pixels: np.ndarray, size: int, method: str) -> np.ndarray:
    """Resizes float32 [height, width, 3] to [size, size, 3], with TensorFlow's filters."""
    # Each channel as floats, because Pillow rounds uint8 after each pass.
    resampling = Image.Resampling[method.upper()]

    def resized(color: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(color).resize((size, size), resampling))

    return np.stack([resized(color) for color in np.moveaxis(pixels, -1, 0)], axis=-1)


def _resize_height(pixels: np.ndarray, size: int, method: str) -> np.ndarray:
    """Resizes float32 [height, width, 3] to [size, width, 3], as TensorFlow interpolates."""
    height = len(pixels)
    scale = np.float32(height) / np.float32(size)
    positions = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(positions)
    rest = positions - below
    if method == "bilinear":
        weights_by_offset = {0: 1 - rest, 1: rest}
    else:
        rest = np.rint(rest * _CUBIC_STEPS) / np.float32(_CUBIC_STEPS)
        weights_by_offset = {offset: _cubic(np.abs(rest - offset)) for offset in (-1, 0, 1, 2)}
    resized = np.zeros((size, *pixels.shape[1:]), np.float32)
    total = np.zeros(size, np.float32)
    for offset, weights in weights_by_offset.items():
        rows = below.astype(int) + offset
        inside = np.clip(rows, 0, height - 1)
        if method == "bicubic":  # which gives rows outside the image no weight
            weights = np.where(rows == inside, weights, np.float32(0))
        total += weights
        resized += weights[:, np.newaxis, np.newaxis] * pixels[inside]
    return resized / total[:, np.newaxis, np.newaxis]


def _cubic(distances: np.ndarray) -> np.ndarray:
    """Returns Keys' kernel with a = -1/2 at distances up to 2."""
    near = (1.5 * distances - 2.5) * distances**2 + 1
    far = ((-0.5 * distances + 2.5) * distances - 4) * distances + 2
    return np.where(distances <= 1, near, far)
