"""Fashion-MNIST as JPEGs whose colours are subsampled, drawn once in brightness, once in colour.

    python tools/studies/jpeg_decoding/jpegs.py --output_dir=data/fashion_jpegs

writes shards into ``brightness`` and ``colour`` of that folder; when it was interrupted, the same
command goes on. Fashion-MNIST is grey, and in grey images the colours, which a JPEG holds at half
the size, cannot be decoded wrongly. So the second set has the same pictures in its colours alone,
from orange to blue of one brightness: whatever decoding does to colours, it does to all that a
network can see. Photographs lie between the two.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import sys

import numpy as np
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare import prepare
from imagenet_fast.data.sources import Item, Source, open_source

BRIGHTNESS, COLOUR = "brightness", "colour"
DRAWINGS = (BRIGHTNESS, COLOUR)
# As `imagenet-fast prepare` takes for pixels.
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
    """Returns an image as a JPEG with colours at half its height and width.

    Args:
      pixels: uint8 [height, width].
      drawing: ``brightness``: the image in grey; ``colour``: in colours between orange and blue
        that have the same brightness.
    """
    neutral = np.full_like(pixels, _NEUTRAL)
    if drawing == BRIGHTNESS:
        planes = (pixels, neutral, neutral)
    else:
        # Half of the range, which leaves every colour within what RGB can show.
        blue = _NEUTRAL // 2 + pixels // 2
        planes = (neutral, blue, 255 - blue)
    file = io.BytesIO()
    image = Image.fromarray(np.stack(planes, axis=-1), "YCbCr")
    image.save(file, "JPEG", quality=_QUALITY, subsampling="4:2:0")
    return file.getvalue()


def main(arguments: list[str]) -> int:
    """Writes both sets; returns 0, 2 after an error of the user's, or 130 if interrupted."""
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
        print("jpegs.py: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
