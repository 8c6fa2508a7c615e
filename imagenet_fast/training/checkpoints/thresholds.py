"""Thresholds of a run whose images have several labels, in its ``thresholds.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import msgspec

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import Count, read_json
from imagenet_fast.base.paths import to_path

FILE = "thresholds.json"

_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The thresholds that an evaluation chose.

    Attributes:
      step: weight updates of the model.
      thresholds: of each class: it is predicted if its probability is at least this.
    """

    step: Count
    thresholds: dict[str, _Probability]

    def of(self, labels: Sequence[str], directory: str) -> list[float]:
        """Returns the threshold of each class.

        Args:
          labels: the names of the model's classes.
          directory: of the run, for messages.

        Raises:
          UserError: the thresholds are of other classes.
        """
        if list(self.thresholds) != list(labels):
            raise UserError(
                f"{to_path(directory, FILE)}: has thresholds of other classes than the model's "
                f"{len(labels)}: it is of another run; delete it, and train or evaluate again"
            )
        return list(self.thresholds.values())


def write_thresholds(directory: str, thresholds: dict[str, Thresholds]) -> None:
    """Writes the thresholds of a run.

    Args:
      directory: of the run.
      thresholds: of the checkpoints ``last`` and, with ``keep_best``, ``best``.
    """
    values = {which: dataclasses.asdict(own) for which, own in thresholds.items()}
    write_file(to_path(directory, FILE), json.dumps(values, indent=1) + "\n")


def read_thresholds(directory: str) -> dict[str, Thresholds]:
    """Returns what :func:`write_thresholds` wrote; empty: nothing.

    Raises:
      UserError: it cannot be read.
    """
    path = to_path(directory, FILE)
    try:
        return read_json(path, dict[str, Thresholds])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; delete it, and evaluate again") from None


def thresholds_of(directory: str, step: int) -> Thresholds | None:
    """Returns the thresholds of the checkpoint of a step; None: it was not evaluated.

    Raises:
      UserError: as :func:`read_thresholds`.
    """
    found = read_thresholds(directory).values()
    return next((own for own in found if own.step == step), None)
