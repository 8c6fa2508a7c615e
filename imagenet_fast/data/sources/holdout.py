"""Random choice of validation images in data sets without a validation split."""

from __future__ import annotations

import numpy as np

from imagenet_fast.base.errors import UserError


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses the same fraction of every class at random.

    Args:
      labels: Integers of shape (n,).
      fraction: Of each class, 0 <= fraction < 1; rounded to whole images, of which each class keeps
        at least one.
      seed: Of the choice.

    Returns:
      bool of shape (n,), True for images to hold out.

    Raises:
      UserError: The fraction is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise UserError(f"the fraction to hold out must be in [0, 1), not {fraction}")
    # RandomState, unlike Generator, promises the same stream in every version of NumPy.
    random = np.random.RandomState(seed)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out[members[: min(round(len(members) * fraction), len(members) - 1)]] = True
    return held_out
