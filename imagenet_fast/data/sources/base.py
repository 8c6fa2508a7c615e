"""What every source of labelled images offers to the converter."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Item(NamedTuple):
    """One labelled image of a source.

    Attributes:
      image: An image file as bytes, or raw uint8 pixels of shape (height, width) for grey or
        (height, width, 3) for RGB.
      label: The class, from 0.
      filename: Its name in the source, for people who look for it.
    """

    image: bytes | np.ndarray
    label: int
    filename: str


class ListedFile(NamedTuple):
    """An image that lies in a file of its own.

    Attributes:
      file: Its name in the source.
      label: As in :class:`Item`.
      size: In bytes.
    """

    file: str
    label: int
    size: int


class Source(abc.ABC):
    """Labelled images in splits, read one by one in any order.

    There is ``train``; there may be ``validation``, and ``test``.

    Attributes:
      kind: The name under which ``open_source`` knows this kind of source.
      name: The data set's name.
      labels: Class names, in the order of the labels.
      synsets: The classes' WordNet ids, or None where classes have none.
      splits: Number of images of each split.
      warnings: What looks odd, but need not stop anyone.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        labels: Iterable[str],
        splits: Mapping[str, int],
        fingerprint: str,
        synsets: Iterable[str] | None = None,
        warnings: Iterable[str] = (),
    ) -> None:
        """Args as the attributes; ``fingerprint`` changes whenever the images may have changed."""
        self.kind = kind
        self.name = name
        self.labels = tuple(labels)
        self.synsets = None if synsets is None else tuple(synsets)
        self.splits = dict(splits)
        self.warnings = tuple(warnings)
        self._fingerprint = fingerprint

    def describe(self) -> dict[str, Any]:
        """Returns JSON values that tell this source from others; equal ones give equal images."""
        return {
            "kind": self.kind,
            "name": self.name,
            "classes": len(self.labels),
            "images": self.splits,
            "fingerprint": self._fingerprint,
        }

    def list_files(self) -> dict[str, list[ListedFile]] | None:
        """Returns the images of each split by index, where each is a file that may come and go.

        None of other sources, which are whole or not at all.
        """
        return None

    @abc.abstractmethod
    def read(self, split: str, index: int) -> Item:
        """Returns image ``index`` of ``split``, 0 <= index < ``splits[split]``.

        May be called from several threads at once.

        Raises:
          OSError: It cannot be read.
        """


def printable(name: str) -> str:
    """Returns a file's name as text, which its bytes need not be."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
