"""scikit-learn's handwritten digits: 1,797 real greyscale images in its package."""

from __future__ import annotations

import numpy as np
from PIL import Image

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.data.prepare.sources.holdout import hold_out

_SIZE = 32
_HOLD_OUT = 0.2


def open_digits() -> ArraySource:
    """Returns the digits, with the same fifth of each class always held out for validation.

    The images have 8x8 pixels with values from 0 to 16. They are scaled to 0..255 and enlarged to
    32x32 (bicubic), the input size of networks for small images.

    Raises:
      UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(f"the digits come with scikit-learn: {how_to_install('digits')}") from error
    digits = load_digits()
    images = np.stack([_enlarge(image) for image in digits.images])
    validation = hold_out(digits.target, _HOLD_OUT, seed=0)
    return ArraySource(
        "digits",
        "digits",
        (str(name) for name in digits.target_names),
        {
            "train": (images[~validation], digits.target[~validation]),
            "validation": (images[validation], digits.target[validation]),
        },
    )


def _enlarge(image: np.ndarray) -> np.ndarray:
    pixels = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
    return np.asarray(pixels.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC))
