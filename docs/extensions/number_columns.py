"""Sphinx extension: columns of numbers in tables, aligned right."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

# A number, perhaps with a word before it, and a unit, deviation or range after it; or nothing.
_NUMBER = re.compile(
    r"(?:(?:about|above|below|at least|at most) )?[-+<>~]?\$?\d[\d,.]*(?: ?(?:%|[a-zA-Zµ/]{1,4}))?"
    r"(?: ± [\d.,]+)?(?: \([\d.,]+(?: to [\d.,]+)?\))?|-|"
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to Sphinx."""
    app.connect("doctree-read", _align)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _align(app: Sphinx, document: nodes.document) -> None:
    """Gives the cells of such columns the class ``number``, for which site.css has a style."""
    for body in document.findall(nodes.tbody):
        rows = [row.children for row in body.parent.findall(nodes.row)]
        heads = len(rows) - len(body.children)
        for column in zip(*rows):
            texts = [entry.astext() for entry in column[heads:]]
            if any(texts) and all(map(_NUMBER.fullmatch, texts)):
                for entry in column:
                    entry["classes"].append("number")
