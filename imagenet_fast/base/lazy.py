"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_attributes(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package whose names come from modules of it.

    So importing the package, or another module of it, does not import TensorFlow.

    Args:
      package: its ``__name__``.
      homes: by module, relative to the package, the names that come from it.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def getattr_(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_
