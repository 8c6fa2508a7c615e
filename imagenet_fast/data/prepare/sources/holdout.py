"""Random choice of validation images in data sets without a validation split."""

from __future__ import annotations

import numpy as np

from imagenet_fast.base.errors import UserError


def hold_out(
    labels: np.ndarray, fraction: float, seed: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """Chooses the same fraction of every class at random.

    Args:
      labels: integers of shape (n,).
      fraction: of each class, 0 <= fraction < 1; rounded to whole images, of which each class keeps
        at least one.
      seed: of the choice.
      groups: names of shape (n,), of images that are held out together or not at all; fractions are
        then met as nearly as their sizes allow. None: each image on its own.

    Returns:
      bool of shape (n,), True for images to hold out.

    Raises:
      UserError: the fraction is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise UserError(f"the fraction to hold out must be in [0, 1), not {fraction}")
    # RandomState, unlike Generator, promises the same stream in every version of NumPy.
    random = np.random.RandomState(seed)
    if groups is not None:
        return _hold_out_groups(labels, fraction, random, groups)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out[members[: _wanted(len(members), fraction)]] = True
    return held_out


def _wanted(images: int, fraction: float) -> int:
    """Returns how many of a class's images to hold out."""
    return min(round(images * fraction), images - 1)


def _hold_out_groups(
    labels: np.ndarray, fraction: float, random: np.random.RandomState, groups: np.ndarray
) -> np.ndarray:
    """Holds out each group, in random order, that brings the classes nearer to their fractions."""
    _, classes, totals = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = np.array([_wanted(total, fraction) for total in totals])
    names, group_of = np.unique(groups, return_inverse=True)
    sizes = np.zeros([len(names), len(totals)], int)  # images by group and class
    np.add.at(sizes, (group_of, classes), 1)
    chosen, held = np.zeros(len(names), bool), np.zeros(len(totals), int)
    for group in random.permutation(len(names)):
        after = held + sizes[group]
        nearer = np.abs(after - wanted).sum() < np.abs(held - wanted).sum()
        if nearer and np.all(after < totals):
            chosen[group], held = True, after
    return chosen[group_of]
