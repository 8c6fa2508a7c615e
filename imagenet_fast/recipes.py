"""Published training runs, each a flagfile that ``--flagfile=NAME`` finds by its name.

A recipe's header gives its source, its commands, the hardware, and what to expect.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from imagenet_fast.base.errors import UserError

_FOLDER = pathlib.Path(__file__).parent / "flags"
_SUFFIX = ".flags"
# A checkout has a link of this name to the folder.
_LINK = "flags"


class Recipe(NamedTuple):
    """A recipe's header.

    Attributes:
      name: its name, for ``--flagfile``.
      about: its first paragraph: source and network.
      hardware: what it is for.
      expected: the accuracy and time to expect, with their source.
      measured: what we measured.
    """

    name: str
    about: str
    hardware: str
    expected: str
    measured: str


def recipe_names() -> list[str]:
    """Returns the names of all recipes, sorted.

    Raises:
      UserError: if the installation has none.
    """
    names = sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))
    if not names:
        raise UserError(f"there are no recipes in {_FOLDER}: reinstall imagenet_fast")
    return names


def find_recipe(flagfile: str) -> pathlib.Path | None:
    """Returns the recipe ``NAME``, ``NAME.flags`` or ``flags/NAME.flags``, None: there is none."""
    path = pathlib.PurePath(flagfile)
    recipe = _FOLDER / f"{path.name.removesuffix(_SUFFIX)}{_SUFFIX}"
    if str(path.parent) in (".", _LINK) and recipe.is_file():
        return recipe
    return None


def read_header(path: pathlib.Path) -> Recipe:
    """Returns what the comments at the start of a recipe say."""
    paragraphs = {"about": ""}
    part = "about"
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        word, colon, rest = text.partition(":")
        if colon and word.lower() in ("hardware", "expected", "measured"):
            part, text = word.lower(), rest.strip()
        elif not text:
            part = "other"
        paragraphs[part] = f"{paragraphs.get(part, '')} {text}".strip()
    return Recipe(path.stem, *(paragraphs.get(name, "") for name in Recipe._fields[1:]))


def recipe_headers() -> list[Recipe]:
    """Returns the headers of all recipes, by name."""
    return [read_header(_FOLDER / f"{name}{_SUFFIX}") for name in recipe_names()]
