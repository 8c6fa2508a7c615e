r"""Prints the dependencies of installed packages, for pip, one per line.

    python requirements.py imagenet_fast tensorflow-tpu keras

These are what ``pip install --no-deps`` of the packages left out, except for the packages
themselves and plain ``tensorflow`` and ``libtpu``, which the stack has under another name or does
not need.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import requires

_WITHOUT = {"tensorflow", "libtpu"}


def missing(packages: Sequence[str]) -> Iterator[str]:
    """Yields the requirements of ``packages`` that are not among them, with their markers.

    Raises:
      importlib.metadata.PackageNotFoundError: if one of them is not installed.
    """
    skipped = _WITHOUT | {_normal(package) for package in packages}
    for package in packages:
        for requirement in requires(package) or ():
            name = re.match(r"[\w.-]+", requirement)
            if name and _normal(name[0]) not in skipped and "extra ==" not in requirement:
                yield requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print("\n".join(missing(sys.argv[1:])))
