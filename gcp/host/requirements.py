r"""Prints what installed packages require, but for packages that are there already.

    python requirements.py imagenet_fast tensorflow-tpu tf_keras

That is what ``pip install --no-deps`` of these left out. Plain ``tensorflow`` and ``libtpu`` are
not asked for: the stack has them under another name, or does without. One requirement a line, as
pip takes it.
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
    there = _WITHOUT | {_normal(package) for package in packages}
    for package in packages:
        for requirement in requires(package) or ():
            name = re.match(r"[\w.-]+", requirement)
            if name and _normal(name[0]) not in there and "extra ==" not in requirement:
                yield requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print("\n".join(missing(sys.argv[1:])))
