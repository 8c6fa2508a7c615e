"""Sphinx extension: README.md as the site's front page."""

from __future__ import annotations

import pathlib
import re
import shutil

from sphinx.application import Sphinx

_CONTENTS = pathlib.Path(__file__).parents[1] / "contents.md"
_RECIPE = re.compile(r"\]\((?:\.\./)*imagenet_fast/flags/(\w+)\.flags\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to Sphinx."""
    app.connect("source-read", _change)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _change(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the table of contents to README.md, and links recipes to their page, not their files."""
    source[0] = _RECIPE.sub(r"](/docs/recipes.md#\1)", source[0])
    if page == app.config.root_doc:
        source[0] += "\n" + _CONTENTS.read_text()


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Copies the front page to index.html, which web servers expect."""
    if error is None:
        shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
