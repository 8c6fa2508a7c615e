"""README.md as the site's front page."""

from __future__ import annotations

import pathlib
import re
import shutil

from sphinx.application import Sphinx

_CONTENTS = pathlib.Path(__file__).parents[1] / "contents.md"
_RECIPE = re.compile(r"\]\((?:\.\./)*flags/(\w+)\.flags\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what follows to Sphinx' events."""
    app.connect("source-read", _change)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _change(app: Sphinx, page: str, source: list[str]) -> None:
    """Gives README.md the table of contents, and shows recipes where GitHub shows their files."""
    source[0] = _RECIPE.sub(r"](/docs/recipes.md#\1)", source[0])
    if page == app.config.root_doc:
        source[0] += "\n" + _CONTENTS.read_text()


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Web servers ask for index.html."""
    if error is None:
        shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
