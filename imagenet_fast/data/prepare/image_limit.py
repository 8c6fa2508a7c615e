"""A limit on a number of images: a count, or a fraction of all of them."""

from __future__ import annotations

import dataclasses
import re

from imagenet_fast.base.errors import UserError

_PATTERN = re.compile(r"(\d+)|(\d*\.\d+(?:e-?\d+)?|\d+e-\d+|\d+\.)|(\d+(?:\.\d*)?|\.\d+)\s*%")


@dataclasses.dataclass(frozen=True)
class ImageLimit:
    """A maximum number of images.

    Attributes:
      text: as given by the user.
      count: the number of images, or None.
      fraction: of all images, in [0, 1], if there is no ``count``.
    """

    text: str
    count: int | None = None
    fraction: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str) -> ImageLimit:
        """Parses a count, such as ``100``, or a fraction, such as ``0.01`` or ``1%``.

        Args:
          text: the limit.
          name: of the option, for errors.

        Raises:
          UserError: it is neither, or the fraction is above 1.
        """
        match = _PATTERN.fullmatch(text.strip().lower())
        if match and match[1]:
            return cls(text, count=int(match[1]))
        fraction = float(match[2] or match[3]) / (100 if match[3] else 1) if match else -1.0
        if not 0 <= fraction <= 1:
            raise UserError(
                f"{name} is {text!r}, but must be a number of images, such as 100, or a fraction "
                "of them, such as 0.01 or 1%"
            )
        return cls(text, fraction=fraction)

    def images(self, total: int) -> int:
        """Returns the maximum number of images, of ``total``."""
        # Corrects rounding of the fraction, e.g. 29% of 100 is 29.
        return int(self.fraction * total + 1e-9 * total) if self.count is None else self.count

    def __str__(self) -> str:
        return self.text
