"""Evaluation's preprocessing with Pillow and NumPy only, for exported ONNX and TFLite models.

These models take resized pixels (:mod:`~imagenet_fast.serving.convert` says why), and are used
where TensorFlow is not installed.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.images import to_grey_or_rgb

# TensorFlow looks the cubic kernel up in a table of so many entries for each pixel.
_CUBIC_STEPS = 1024


def prepare_image(
    encoded: bytes,
    size: int,
    crop_fraction: float = 0.875,
    resize_method: str = "bilinear",
    antialias: bool = False,
) -> np.ndarray:
    """Decodes an image, takes the square in its middle and resizes it.

    What is transparent becomes white, and 16 bits 8, as in what ``imagenet-fast prepare`` writes.

    Pixels are those of evaluation with ``jpeg_dct=accurate``, ``jpeg_upsampling=smooth`` and no
    ``jpeg_scaling``, which are the defaults. A few differ by 1 of 255 where a rounding is close;
    at the square's edges a JPEG's colours, held at half the size, differ by a few.

    Args:
      encoded: bytes of a JPEG, a PNG, or what else Pillow reads.
      size: height and width of the result, in pixels.
      crop_fraction: side of the square, as a fraction of the image's shorter side.
      resize_method: ``bilinear`` or ``bicubic``.
      antialias: whether what is made smaller is antialiased.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UserError: if it is no image that Pillow can read.
    """
    try:
        image = to_grey_or_rgb(Image.open(io.BytesIO(encoded))).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"not a whole image: {error}") from None
    side = max(int(np.rint(np.float32(crop_fraction) * np.float32(min(image.size)))), 1)
    left, top = ((length - side + 1) // 2 for length in image.size)
    pixels = np.asarray(image.crop((left, top, left + side, top + side)), np.float32)
    if antialias:
        pixels = _resize_antialiased(pixels, size, resize_method)
    else:
        for _ in range(2):  # both ways alike
            pixels = _resize_height(pixels, size, resize_method).swapaxes(0, 1)
    # Cubic kernels overshoot at edges.
    return np.clip(pixels + 0.5, 0, 255).astype(np.uint8)


def _resize_antialiased(pixels: np.ndarray, size: int, method: str) -> np.ndarray:
    """Returns float32 [size, size, 3] of [height, width, 3], whose filters are TensorFlow's too."""
    # Each colour as floats, since Pillow rounds what it resizes of uint8 after either way.
    resampling = Image.Resampling[method.upper()]

    def resized(colour: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(colour).resize((size, size), resampling))

    return np.stack([resized(colour) for colour in np.moveaxis(pixels, -1, 0)], axis=-1)


def _resize_height(pixels: np.ndarray, size: int, method: str) -> np.ndarray:
    """Returns float32 [size, width, 3] of [height, width, 3], as TensorFlow interpolates."""
    height = len(pixels)
    scale = np.float32(height) / np.float32(size)
    places = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(places)
    beyond = places - below
    if method == "bilinear":
        neighbours = {0: 1 - beyond, 1: beyond}
    else:
        beyond = np.rint(beyond * _CUBIC_STEPS) / np.float32(_CUBIC_STEPS)
        neighbours = {offset: _cubic(np.abs(beyond - offset)) for offset in (-1, 0, 1, 2)}
    resized = np.zeros((size, *pixels.shape[1:]), np.float32)
    total = np.zeros(size, np.float32)
    for offset, shares in neighbours.items():
        at = below.astype(int) + offset
        inside = np.clip(at, 0, height - 1)
        if method == "bicubic":  # for which there is nothing beyond the edges
            shares = np.where(at == inside, shares, np.float32(0))
        total += shares
        resized += shares[:, np.newaxis, np.newaxis] * pixels[inside]
    return resized / total[:, np.newaxis, np.newaxis]


def _cubic(distances: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2, of distances up to 2."""
    near = (1.5 * distances - 2.5) * distances**2 + 1
    far = ((-0.5 * distances + 2.5) * distances - 4) * distances + 2
    return np.where(distances <= 1, near, far)
