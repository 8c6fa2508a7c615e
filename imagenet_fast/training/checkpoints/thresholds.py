"""Thresholds of a run whose images have several labels, in its ``thresholds.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Union

import msgspec

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import Count, read_json
from imagenet_fast.base.paths import to_path

FILE = "thresholds.json"

_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Unknown = Union[_Probability, None]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The thresholds that an evaluation chose.

    Attributes:
      step: weight updates of the model.
      thresholds: of each class: it is predicted if its probability is at least this.
      average_precisions: of each class in the evaluation; None without images.
    """

    step: Count
    thresholds: dict[str, _Probability]
    average_precisions: dict[str, _Unknown]


def write_thresholds(directory: str, thresholds: dict[str, Thresholds]) -> None:
    """Writes a run's thresholds: of checkpoint ``last`` and, with ``keep_best``, ``best``."""
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
        raise UserError(
            f"{path}: cannot be read: {error}; bring it back from a copy, or train again"
        ) from None


def thresholds_of(directory: str, checkpoint: str, labels: Sequence[str]) -> list[float] | None:
    """Returns the thresholds that training chose for a checkpoint; None: it was not evaluated.

    Raises:
      UserError: as :func:`read_thresholds`, or they are of other classes.
    """
    step = checkpoint.rpartition("-")[2]
    found = read_thresholds(directory).values()
    chosen = next((own.thresholds for own in found if str(own.step) == step), None)
    if chosen is None:
        return None
    if list(chosen) != list(labels):
        raise UserError(
            f"{to_path(directory, FILE)}: has thresholds of other classes than the model's "
            f"{len(labels)}: it is of another run; bring back the run's, or train again"
        )
    return list(chosen.values())
