"""Fashion-MNIST as JPEGs with chroma subsampling, encoded once as luma and once as chroma.

    python tools/studies/jpeg_decoding/jpegs.py --output_dir=data/fashion_jpegs

writes shards into the folders ``brightness`` and ``colour``; rerun it to resume. Fashion-MNIST is
grey, and in grey images the subsampled colours cannot be decoded wrongly. The second set therefore
has the same images in its colours only, from orange to blue at constant brightness, so that errors
in colours affect everything that a network sees. Photographs are between the two.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import sys

import numpy as np
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import Item, Source, open_source

BRIGHTNESS, COLOUR = "brightness", "colour"
DRAWINGS = (BRIGHTNESS, COLOUR)
# The quality with which `imagenet-fast prepare` encodes pixels.
_QUALITY = 95
_NEUTRAL = 128


class JpegSource(Source):
    """The images of a grey source as JPEGs."""

    def __init__(self, source: Source, drawing: str) -> None:
        """Initializes the source.

        Args:
          source: of pixels, uint8 [height, width].
          drawing: one of ``DRAWINGS``.
        """
        described = source.describe()
        super().__init__(
            f"{source.kind} as JPEGs",
            f"{source.name} in {drawing}",
            source.labels,
            source.splits,
            described["fingerprint"],
        )
        self._source = source
        self._drawing = drawing

    def read(self, split: str, index: int) -> Item:
        """As ``Source``."""
        item = self._source.read(split, index)
        return item._replace(image=encode(item.image, self._drawing))


def encode(pixels: np.ndarray, drawing: str) -> bytes:
    """Encodes an image as a JPEG with colours at half its height and width.

    Args:
      pixels: uint8 [height, width].
      drawing: ``brightness``: the image in grey; ``colour``: in colours between orange and blue
        that have the same brightness.
    """
    neutral = np.full_like(pixels, _NEUTRAL)
    if drawing == BRIGHTNESS:
        planes = (pixels, neutral, neutral)
    else:
        # Half of the range, so that every colour can be represented in RGB.
        blue = _NEUTRAL // 2 + pixels // 2
        planes = (neutral, blue, 255 - blue)
    file = io.BytesIO()
    image = Image.fromarray(np.stack(planes, axis=-1), "YCbCr")
    image.save(file, "JPEG", quality=_QUALITY, subsampling="4:2:0")
    return file.getvalue()


def main(arguments: list[str]) -> int:
    """Writes both sets; returns 0, 2 after a user error, or 130 if interrupted."""
    parser = argparse.ArgumentParser(
        "jpegs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument(
        "--source_path", help="Fashion-MNIST's idx files (default: of dataset-fashion-mnist)"
    )
    given = parser.parse_args(arguments)
    try:
        source = open_source("idx", given.source_path)
        for drawing in DRAWINGS:
            prepare(JpegSource(source, drawing), given.output_dir / drawing)
        return 0
    except UserError as error:
        print(f"jpegs.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jpegs.py: interrupted; rerun the command to resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
