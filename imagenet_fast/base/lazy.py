"""Lazy imports of a package's public names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_attributes(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, which imports each name's module on first use.

    Importing the package, or one of its modules, then does not import TensorFlow.

    Args:
      package: the package's ``__name__``.
      homes: the names that each module defines, by module name relative to the package.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def getattr_(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_
