"""A limit on a number of images: a count, or a fraction of all of them."""

from __future__ import annotations

import dataclasses
import re

from imagenet_fast.base.errors import UserError

_PATTERN = re.compile(r"(\d+)|(\d*\.\d+(?:e-?\d+)?|\d+e-\d+|\d+\.)|(\d+(?:\.\d*)?|\.\d+)\s*%")


@dataclasses.dataclass(frozen=True)
class ImageLimit:
    """At most so many images.

    Attributes:
      text: As the user gave it.
      count: The number of images, or None.
      fraction: Of all images, in [0, 1], where there is no ``count``.
    """

    text: str
    count: int | None = None
    fraction: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str) -> ImageLimit:
        """Reads a count, as ``100``, or a fraction, as ``0.01`` or ``1%``.

        Args:
          text: What to read.
          name: That of the option, for the error.

        Raises:
          UserError: It is neither, or the fraction is above 1.
        """
        match = _PATTERN.fullmatch(text.strip().lower())
        if match and match[1]:
            return cls(text, count=int(match[1]))
        fraction = float(match[2] or match[3]) / (100 if match[3] else 1) if match else -1.0
        if not 0 <= fraction <= 1:
            raise UserError(
                f"{name} is {text!r}, but must be a number of images, as 100, or a fraction of "
                "them, as 0.01 or 1%"
            )
        return cls(text, fraction=fraction)

    def images(self, total: int) -> int:
        """Returns the most images that it allows, of ``total``."""
        # One that is whole but for the rounding of the fraction, as 29% of 100, counts as whole.
        return int(self.fraction * total + 1e-9 * total) if self.count is None else self.count

    def __str__(self) -> str:
        return self.text
