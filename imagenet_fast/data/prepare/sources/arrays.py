"""Sources whose images are NumPy arrays in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.sources.base import Item, Source


class ArraySource(Source):
    """A source whose pixels and labels are NumPy arrays.

    Args:
      kind, name, labels: as ``Source``.
      arrays: for each split, the images, uint8 of shape (n, height, width) or (n, height, width,
        3), and the labels, integers of shape (n,).

    Raises:
      UserError: the numbers of labels and images differ, or a label is out of range.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        labels: Iterable[str],
        arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        labels = tuple(labels)
        digest = hashlib.sha256()
        for split, (images, numbers) in arrays.items():
            if len(images) != len(numbers):
                raise UserError(
                    f"{name}: {split} has {counted(len(images), 'image')}, but "
                    f"{counted(len(numbers), 'label')}"
                )
            wrong = np.flatnonzero((numbers < 0) | (numbers >= len(labels)))
            if wrong.size:
                raise UserError(
                    f"{name}: {split} image {wrong[0]} has the label {numbers[wrong[0]]}, outside "
                    f"0..{len(labels) - 1}"
                )
            digest.update(np.ascontiguousarray(images).data)
            digest.update(np.ascontiguousarray(numbers, np.int64).data)
        sizes = {split: len(numbers) for split, (_, numbers) in arrays.items()}
        super().__init__(kind, name, labels, sizes, digest.hexdigest())
        self._arrays = dict(arrays)

    def read(self, split: str, index: int) -> Item:
        """As ``Source``; the filename consists of the split and the index."""
        images, numbers = self._arrays[split]
        return Item(images[index], int(numbers[index]), f"{split}_{index:05d}")


def pad_images(images: np.ndarray, size: int) -> np.ndarray:
    """Pads images with zeros to squares; an odd pixel is added at the bottom or right.

    Args:
      images: uint8 of shape (n, height, width) or (n, height, width, 3).
      size: height and width of the squares.

    Raises:
      UserError: the images are larger.
    """
    height, width = images.shape[1:3]
    if size < max(height, width):
        raise UserError(
            f"pad_to={size} is less than the images' {height} x {width} pixels: give "
            f"{max(height, width)} or more, or 0 for no padding"
        )
    top, left = (size - height) // 2, (size - width) // 2
    borders = [(0, 0), (top, size - height - top), (left, size - width - left), (0, 0)]
    return np.pad(images, borders[: images.ndim])
