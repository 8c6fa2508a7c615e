"""Training durations in steps, epochs or examples, and times in milliseconds."""

from __future__ import annotations

import dataclasses
import math
import re

from imagenet_fast.base.errors import UserError

UNITS = ("steps", "epochs", "examples")
_PATTERN = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-z]+)")


@dataclasses.dataclass(frozen=True)
class Duration:
    """An amount of training, e.g. ``Duration(90, "epochs")``.

    Attributes:
      amount: the number of units, not negative; it may be fractional.
      unit: ``steps`` (weight updates), ``epochs`` (passes over the training set) or ``examples``
        (training images).

    Raises:
      UserError: if the unit is unknown, or the amount is negative or not finite.
    """

    amount: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unknown unit {self.unit!r}: choose from {', '.join(UNITS)}")
        if not 0 <= self.amount < math.inf:
            raise UserError(
                f"{self.amount} {self.unit} is not a duration: it must be finite and not negative"
            )

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Reads ``90 epochs``, ``90epochs``, ``1 epoch``, ``5000 steps`` or ``1e6 examples``.

        Raises:
          UserError: if ``text`` is anything else.
        """
        match = _PATTERN.fullmatch(text.strip())
        unit = match and (match[2] if match[2].endswith("s") else match[2] + "s")
        if not match or unit not in UNITS:
            raise UserError(
                f"{text!r} is not a duration: write a number and a unit ({', '.join(UNITS)}), "
                "as in '90 epochs' or '5000steps'"
            )
        try:
            amount = float(match[1])
        except ValueError:
            raise UserError(f"{text!r} is not a duration: {match[1]!r} is not a number") from None
        if not amount < math.inf:
            raise UserError(f"{text!r} is not a duration: {match[1]!r} is too large")
        return cls(amount, unit)

    def steps(self, steps_per_epoch: int, batch_size: int) -> int:
        """Returns the number of weight updates, rounded to the nearest integer.

        Args:
          steps_per_epoch: weight updates in an epoch.
          batch_size: global batch size, in images.
        """
        return round(self.exact_steps(steps_per_epoch, batch_size))

    def exact_steps(self, steps_per_epoch: int, batch_size: int) -> float:
        """Returns the unrounded number of weight updates.

        For example, 17936338 examples are 547.37 updates at batch 32768.

        Args:
          steps_per_epoch: weight updates in an epoch.
          batch_size: global batch size, in images.
        """
        if self.unit == "epochs":
            return self.amount * steps_per_epoch
        if self.unit == "examples":
            return self.amount / batch_size
        return self.amount

    def __str__(self) -> str:
        unit = self.unit[:-1] if self.amount == 1 else self.unit
        # All digits: config.json stores this text, and a resumed run parses it.
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount} {unit}"


def milliseconds(seconds: float) -> str:
    """Returns a time as text: three significant digits, whole milliseconds from 1,000 ms."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
