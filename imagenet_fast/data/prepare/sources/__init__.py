"""Sources of labelled images for ``prepare``, one module per kind."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.paths import to_local_path, to_path
from imagenet_fast.data.prepare.sources.base import Item, ListedFile, Source
from imagenet_fast.data.prepare.sources.cifar import open_cifar10, open_cifar100
from imagenet_fast.data.prepare.sources.digits import open_digits
from imagenet_fast.data.prepare.sources.folders import open_folders
from imagenet_fast.data.prepare.sources.huggingface import open_huggingface
from imagenet_fast.data.prepare.sources.idx import open_idx
from imagenet_fast.data.prepare.sources.imagenet import open_imagenet
from imagenet_fast.data.prepare.sources.listed import open_list
from imagenet_fast.data.prepare.sources.tfds import open_tfds

__all__ = ["KINDS", "Item", "ListedFile", "Source", "check_source", "open_source"]

# A kind's options are its function's parameters; it requires a path if `path` has no default.
KINDS: dict[str, Callable[..., Source]] = {
    "cifar10": open_cifar10,
    "cifar100": open_cifar100,
    "digits": open_digits,
    "folders": open_folders,
    "huggingface": open_huggingface,
    "idx": open_idx,
    "imagenet": open_imagenet,
    "list": open_list,
    "tfds": open_tfds,
}
# The option of `prepare` that is the argument ``path`` here.
_PATH = "source_path"
_IN_BUCKETS = ("folders",)


def open_source(kind: str, path: str | os.PathLike[str] | None = None, **options: Any) -> Source:
    """Returns a source of labelled images.

    Args:
      kind: a key of ``KINDS``.
      path: of the source's files; None for kinds with a default.
      **options: the arguments of the kind's function.

    Raises:
      UserError: there is no such kind or option, the path is missing or not supported, or the
        source cannot be used.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if path is not None:
        given["path"] = to_path(path) if kind in _IN_BUCKETS else to_local_path(path, _PATH)
    check_source(kind, given)
    source = KINDS[kind](**given)
    source.opening = functools.partial(open_source, kind, path, **options)
    return source


def check_source(kind: str, given: Collection[str]) -> None:
    """Checks the kind of a source and the names of its options, without reading it.

    Args:
      kind: a key of ``KINDS``.
      given: the names of the given options, ``path`` among them.

    Raises:
      UserError: there is no such kind or option, or the path is missing.
    """
    if kind not in KINDS:
        raise UserError(f"no source {kind!r}; choose from {', '.join(KINDS)}{nearest(kind, KINDS)}")
    parameters = inspect.signature(KINDS[kind]).parameters
    options = [_PATH if name == "path" else name for name in parameters]
    unknown = sorted(set(given) - parameters.keys())
    if unknown:
        name = _PATH if unknown[0] == "path" else unknown[0]
        others = f": it has only {', '.join(options)}" if options else " or other options"
        raise UserError(f"the source {kind!r} has no {name}{others}{nearest(name, options)}")
    needs_path = "path" in parameters and parameters["path"].default is inspect.Parameter.empty
    if needs_path and "path" not in given:
        raise UserError(f"the source {kind!r} needs {_PATH}")
