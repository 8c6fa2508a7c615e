"""``imagenet-fast recipes``."""

from __future__ import annotations

import re
import shlex
import textwrap

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.option import option_text
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.optimizers.batch_tables import BATCH_TABLES, options_for_batch
from imagenet_fast.recipes import Recipe, find_recipe, recipe_headers, recipe_names

_WIDTH = 96
_INDENT = " " * 4
# The end of a sentence, which "et al. 2018" does not have.
_SENTENCE_END = re.compile(r"\.(?<!al\.) (?=[A-Z])")


def main(arguments: list[str]) -> int:
    """Lists the recipes, or prints those that are named, or values for another batch size."""
    flags = CommandFlags(
        "recipes",
        about="Lists the recipes. With names, prints those recipes: commands, source, values.",
    )
    flags.define(
        "batch_table",
        "",
        "print the flags for batch_size, interpolated between published recipes for lars: "
        + " or ".join(BATCH_TABLES),
    )
    flags.define("batch_size", 0, "images in a weight update, for batch_table")
    names = flags.parse(arguments, positional="[NAME]")
    if flags["batch_table"]:
        options = options_for_batch(flags["batch_table"], flags["batch_size"])
        texts = {name: option_text(value) for name, value in options.items()}
        print(" ".join(f"--{name}={shlex.quote(text)}" for name, text in texts.items()))
        return 0
    if not names:
        print("\n\n".join(_summary(recipe) for recipe in recipe_headers()))
        print("\nimagenet-fast recipes NAME prints one; --flagfile=NAME trains it.")
        return 0
    paths = [find_recipe(name) for name in names]
    for name, path in zip(names, paths):
        if path is None:
            raise UserError(f"there is no recipe {name!r}{nearest(name, recipe_names())}")
    print("\n".join(path.read_text(encoding="utf-8").rstrip() for path in paths if path))
    return 0


def _summary(recipe: Recipe) -> str:
    lines = [
        _first_sentence(recipe.about),
        f"Hardware: {_first_sentence(recipe.hardware)}",
        f"Expected: {_first_sentence(recipe.expected)}",
    ]
    wrapped = (
        textwrap.fill(line, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
        for line in lines
    )
    return "\n".join([recipe.name, *wrapped])


def _first_sentence(text: str) -> str:
    return f"{_SENTENCE_END.split(text)[0].rstrip('.')}."
