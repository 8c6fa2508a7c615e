"""The interface of sources of labelled images."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import images
from imagenet_fast.data.examples import Label

# Labels above this are assumed not to be class indices, and lists above it not of classes.
MAX_CLASSES = 1_000_000


class Item(NamedTuple):
    """One labelled image of a source.

    Attributes:
      image: an image file as bytes, or raw uint8 pixels of shape (height, width) for greyscale or
        (height, width, 3) for RGB; or why it cannot be used.
      label: index of the class; of multi-label data those of all its classes, each once.
      filename: its name in the source, for display.
    """

    image: bytes | np.ndarray | images.BadImageError
    label: Label
    filename: str


class ListedFile(NamedTuple):
    """An image file of a source.

    Attributes:
      file: its name in the source.
      label: as in :class:`Item`.
      size: in bytes.
      copy: the number of earlier images that are the same file.
      group: of images that must be in one split, as a patient's; empty: none.
    """

    file: str
    label: Label
    size: int
    copy: int = 0
    group: str = ""


class Source(abc.ABC):
    """Labelled images in splits, with random access.

    The split ``train`` is required; ``validation`` and ``test`` are optional.

    Attributes:
      kind: the name of this kind of source in ``open_source``.
      name: the data set's name.
      labels: class names, in the order of the labels, without spaces around them. Each is one
        line of text, and no two are equal if there are no synsets.
      synsets: the classes' WordNet ids, or None.
      splits: number of images of each split.
      warnings: problems that do not prevent preparation.
      pad_to: height and width to which the source has padded its images with zeros; 0: none.
      multi_label: whether an image has any number of labels, also none.
      in_bucket: whether it is read by TensorFlow's client, which a forked process cannot use.
      opening: gives the same source in another process; picklable. None: nothing does.
    """

    pad_to = 0
    multi_label = False
    in_bucket = False
    opening: Callable[[], Source] | None = None

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
        """The arguments are the attributes; ``fingerprint`` changes if the images may have.

        Raises:
          UserError: a class name cannot be used.
        """
        self.kind = kind
        self.name = name
        self.labels = _class_names(name, labels, distinct=synsets is None)
        self.synsets = None if synsets is None else tuple(synsets)
        self.splits = dict(splits)
        self.warnings = tuple(warnings)
        self._fingerprint = fingerprint

    def describe(self) -> dict[str, Any]:
        """Returns JSON values that identify the source: equal values mean equal images."""
        return {
            "kind": self.kind,
            "name": self.name,
            "classes": len(self.labels),
            "images": self.splits,
            "fingerprint": self._fingerprint,
            **({"multi_label": True} if self.multi_label else {}),
        }

    def list_files(self) -> dict[str, list[ListedFile]] | None:
        """Returns the images of each split, by index, if each is a file of its own.

        Such files may be added and removed. Other sources return None: they do not change in part.
        """
        return None

    def opener(self) -> Callable[[Mapping[str, list[ListedFile]] | None], Source]:
        """Returns a picklable function that gives the source on another machine.

        Of a source that lists files, it gives those that are its argument, by split.

        Raises:
          UserError: the source cannot be opened again.
        """
        if self.opening is None:
            raise UserError(
                f"{self.name}: cannot be opened by other machines: set its attribute `opening`"
            )
        return functools.partial(_open_again, self.opening, self.describe())

    @abc.abstractmethod
    def read(self, split: str, index: int) -> Item:
        """Returns image ``index`` of ``split``, 0 <= index < ``splits[split]``.

        Thread-safe.

        Raises:
          OSError: it cannot be read.
        """


def _open_again(opening: Callable[[], Source], described: dict[str, Any], _: object) -> Source:
    source = opening()
    if source.describe() != described:
        raise UserError(
            f"{source.name}: holds other images for a worker than where prepare was started: give "
            "a path at which all machines find the same files"
        )
    return source


def _class_names(place: str, names: Iterable[str], distinct: bool) -> tuple[str, ...]:
    """Returns names of classes as :class:`Source` has them."""
    numbers: dict[str, int] = {}
    stripped = tuple(name.strip() for name in names)
    for number, name in enumerate(stripped):
        if "\0" in name or name.splitlines() != [name] or name != printable(name):
            reason = "which is not one line of text in UTF-8" if name else "which is empty"
            raise UserError(f"{place}: class {number} is named {name!r}, {reason}: rename it")
        first = numbers.setdefault(name, number)
        if first != number and distinct:
            raise UserError(
                f"{place}: classes {first} and {number} have the same name, {name!r}, without the "
                "spaces around it: rename one of them, or make them one class"
            )
    return stripped


def printable(name: str) -> str:
    """Returns a name with what is not valid in UTF-8 replaced: bytes of a file's, or surrogates."""
    try:
        return name.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # JSON and pickles can hold half a character
        return name.encode(errors="replace").decode()
