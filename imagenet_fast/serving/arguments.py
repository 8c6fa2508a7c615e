"""Checks of arguments of ``predict`` that need no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

from imagenet_fast.base.errors import UserError


def check_arguments(directory: str, paths: Sequence[str]) -> None:
    """Checks that a SavedModel and images are named.

    Args:
      directory: of the SavedModel.
      paths: of the images.

    Raises:
      UserError: if one is missing.
    """
    if not paths:
        raise UserError("no images: name image files or folders")
    if not directory:
        raise UserError("no model: give --saved_model, a directory that `export` wrote")
