"""What ``prepare`` does to pixels, and whoever asks the trained model must do to other images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, Union

import msgspec
import numpy as np

from imagenet_fast.base.outside import as_type
from imagenet_fast.data.images import (
    ONE_AT_A_TIME,
    EncodedImage,
    SizeLimit,
    encode_pixels,
    normalize_encoding,
)

_Side = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
_Limit = Union[_Side, None]  # Python 3.9 cannot evaluate the annotation _Side | None


@dataclasses.dataclass(frozen=True)
class Preparation:
    """The options of ``prepare`` that decide on pixels.

    Attributes:
      encoding: format of re-encoded images, ``jpeg`` (of quality 95, not lossless) or ``png``.
      max_side: images with a longer side above this are shrunk to it; None: no limit.
      shorter_side: likewise for the shorter side.
      exif: whether images are turned by their EXIF orientation: ``ignore`` or ``apply``.
      pad_to: height and width to which images that are not larger are padded with zeros; 0: none.
    """

    encoding: Literal["jpeg", "png"] = "jpeg"
    max_side: _Limit = None
    shorter_side: _Limit = None
    exif: Literal["ignore", "apply"] = "ignore"
    pad_to: _Side = 0

    def __post_init__(self) -> None:
        given = [n for n in ("max_side", "shorter_side", "pad_to") if getattr(self, n)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: give one of them")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Preparation:
        """Returns the one in a manifest's ``source``, or as :meth:`job` gave it.

        Raises:
          ValueError: if a value is not possible.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        return as_type({name: values[name] for name in names if name in values}, cls)

    @property
    def job(self) -> dict[str, Any]:
        """As JSON values; without ``pad_to`` where there is none, as earlier versions wrote it."""
        values = dataclasses.asdict(self)
        return values if self.pad_to else {k: v for k, v in values.items() if k != "pad_to"}

    @property
    def keeps_jpegs(self) -> bool:
        """Whether a greyscale or RGB JPEG is as good as in a shard."""
        return self.exif == "ignore" and not (self.max_side or self.shorter_side or self.pad_to)

    @property
    def size_limit(self) -> SizeLimit:
        """The size above which images are shrunk."""
        return SizeLimit(self.max_side, self.shorter_side)

    def encoded(
        self, image: bytes | np.ndarray, one_at_a_time: AbstractContextManager[Any] = ONE_AT_A_TIME
    ) -> EncodedImage:
        """Returns an image file, or pixels of a source, which has padded them, as in a shard.

        See :func:`~imagenet_fast.data.images.normalize_encoding`.

        Raises:
          BadImageError: it cannot be decoded or encoded.
        """
        if not isinstance(image, bytes):
            return encode_pixels(image, self.encoding, self.size_limit)
        return normalize_encoding(
            image,
            self.encoding,
            size_limit=self.size_limit,
            exif=self.exif,
            pad_to=self.pad_to,
            one_at_a_time=one_at_a_time,
        )
