"""A number for each class, from an option: weights in the loss, or shares of the images drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.outside import read_json
from imagenet_fast.base.paths import to_path

BALANCED = "balanced"
# In a run's directory.
CLASS_VALUES_FILE = "class_values.json"
_Value = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


def recorded_class_values(model_dir: str) -> dict[str, dict[str, float]]:
    """Returns the values by class and option with which a run began; empty if there are none.

    Raises:
      UserError: if they cannot be read.
    """
    file = to_path(model_dir, CLASS_VALUES_FILE)
    try:
        return read_json(file, dict[str, dict[str, _Value]])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def read_class_values(
    option: str, path: str, labels: Sequence[str], model_dir: str = ""
) -> np.ndarray:
    """Returns the numbers in a JSON file, ``{"cat": 2, "dog": 0.5}``; 1 for other classes.

    The values that the run in ``model_dir`` recorded count if there is no such file any more. The
    ``option`` is for messages.

    Returns:
      float64 [classes].

    Raises:
      UserError: if it cannot be read, names another class, has a negative number, or only zeros.
    """
    try:
        given = read_json(to_path(path), dict[str, _Value])
    except OSError as error:
        recorded = recorded_class_values(model_dir).get(option) if model_dir else None
        if recorded and isinstance(error, FileNotFoundError):
            return np.array([recorded.get(label, 1.0) for label in labels])
        hint = nearest(path, [BALANCED])
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}{hint}") from None
    except ValueError as error:
        raise UserError(
            f'{option}: {path} is not a JSON object of numbers by class, as {{"cat": 2}}: {error}'
        ) from None
    unknown = sorted(set(given) - set(labels))
    if unknown:
        raise UserError(
            f"{option}: {path} names {unknown[0]!r}, which is no class{nearest(unknown[0], labels)}"
        )
    values = np.array([given.get(label, 1.0) for label in labels])
    if not values.any():
        raise UserError(f"{option}: {path} gives 0 to all classes")
    return values
