"""Documentation pages with parts that are generated from a study's log."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_results

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def rewrite(name: str, filled: Callable[[str], str], directory: pathlib.Path) -> None:
    """Regenerates a page of ``docs/``.

    Args:
      name: the page's file.
      filled: maps the old text to the new one.
      directory: where to write it: ``DOCS``, or elsewhere.

    Raises:
      UserError: if it cannot be written, or ``filled`` does not find a part.
    """
    write_results(directory, {name: filled((DOCS / name).read_text(encoding="utf-8"))})


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Replaces the generated parts of a Markdown page.

    A part is between ``<!-- NAME -->`` and ``<!-- end of NAME -->``.

    Args:
      text: the page.
      parts: the new content of each part, by name.

    Raises:
      UserError: if the page lacks the marks of a part.
    """
    for name, content in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise UserError(f"the page has no part between {begin} and {end}")
        text = pattern.sub(lambda _, new=f"{begin}\n{content}\n{end}": new, text)
    return text
