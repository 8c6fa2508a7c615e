"""Holding some images back for validation, where a data set has no such split of its own."""

from __future__ import annotations

import numpy as np

from imagenet_fast.base.errors import UserError


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses the same fraction of every class.

    Args:
      labels: Integers of shape (n,).
      fraction: Of each class, 0 < fraction < 1; rounded to whole images, and each class keeps one.
      seed: Which images; the choice depends on nothing else.

    Returns:
      bool of shape (n,), True for what is held out.

    Raises:
      UserError: The fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the fraction to hold out must be between 0 and 1, not {fraction}")
    # RandomState, unlike Generator, promises the same stream in every version of NumPy.
    random = np.random.RandomState(seed)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out[members[: min(round(len(members) * fraction), len(members) - 1)]] = True
    return held_out
