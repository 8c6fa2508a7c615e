"""Random choice of validation images in data sets without a validation split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.examples import Label, classes_of


def hold_out(
    labels: np.ndarray | Sequence[Label],
    fraction: float,
    seed: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Chooses the same fraction of every class at random.

    Args:
      labels: integers of shape (n,); or of each image its classes. Images of several, or of none,
        which count as a class, are held out so that fractions are met as nearly as possible.
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
    if not isinstance(labels, np.ndarray):
        counts = [len(classes_of(label)) for label in labels]
        places = np.repeat(np.arange(len(labels)), np.maximum(counts, 1))
        classes = np.array([own for label in labels for own in classes_of(label) or (-1,)], int)
        members = np.arange(len(labels)) if groups is None else groups
        return _hold_out_groups(classes, fraction, random, members, places)
    if groups is not None:
        return _hold_out_groups(labels, fraction, random, groups, np.arange(len(labels)))
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out[members[: _wanted(len(members), fraction)]] = True
    return held_out


def _wanted(images: int, fraction: float) -> int:
    """Returns how many of a class's images to hold out."""
    return min(round(images * fraction), images - 1)


def _hold_out_groups(
    labels: np.ndarray,
    fraction: float,
    random: np.random.RandomState,
    groups: np.ndarray,
    places: np.ndarray,
) -> np.ndarray:
    """Holds out each group, in random order, that brings the classes nearer to their fractions.

    ``labels`` are classes of the images at the same positions of ``places``, in ascending order;
    ``groups`` are names of shape (n,).
    """
    _, classes, totals = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = np.array([_wanted(total, fraction) for total in totals])
    names, group_of = np.unique(groups, return_inverse=True)
    # Images by group and class, without zeros.
    pairs = np.stack([group_of[places], classes], 1)
    pairs, sizes = np.unique(pairs, axis=0, return_counts=True)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(names) + 1))
    chosen, held = np.zeros(len(names), bool), np.zeros(len(totals), int)
    for group in random.permutation(len(names)):
        part = slice(starts[group], starts[group + 1])
        own = pairs[part, 1]
        after = held[own] + sizes[part]
        nearer = np.abs(after - wanted[own]).sum() < np.abs(held[own] - wanted[own]).sum()
        if nearer and np.all(after < totals[own]):
            chosen[group] = True
            held[own] = after
    return chosen[group_of]
