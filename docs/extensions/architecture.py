"""Sphinx extension: a table of the imports between the package's folders, drawn from the code."""

from __future__ import annotations

import ast
import collections
import pathlib
import re
import sys

import matplotlib.style
from matplotlib.figure import Figure
from sphinx.application import Sphinx

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of Sphinx there

from imagenet_fast.base.plotting import COLORS, PLOT_STYLE, svg

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGE = "imagenet_fast"
_MARK = "<!-- imports -->"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to Sphinx."""
    app.connect("source-read", _write_picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write_picture(app: Sphinx, page: str, source: list[str]) -> None:
    if _MARK in source[0]:
        picture = svg(draw(layers(), count_imports()))
        # Matplotlib's comments repeat the labels, which are marks of from_code.py.
        picture = re.sub(r"<!--.*?-->", "", picture)
        source[0] = source[0].replace(
            _MARK, f"```{{raw}} html\n{picture[picture.index('<svg') :]}\n```"
        )


def layers() -> list[str]:
    """Returns the folders from the top down, from import-linter's contract."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    return project["tool"]["importlinter"]["contracts"][0]["layers"]


def count_imports() -> collections.Counter[tuple[str, str]]:
    """Returns how many modules of a folder import from another one, by (folder, other)."""
    package = _ROOT / _PACKAGE
    pairs = set()
    for path in package.rglob("*.py"):
        folder = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_PACKAGE}."):
                pairs.add((path, folder, node.module.split(".")[1]))
    return collections.Counter((folder, other) for _, folder, other in pairs if folder != other)


def draw(names: list[str], counts: collections.Counter[tuple[str, str]]) -> Figure:
    """Returns a table of how many modules of a row's folder import from a column's."""
    with matplotlib.style.context(PLOT_STYLE):
        figure = Figure(figsize=(7.6, 5.6), layout="constrained")
        axes = figure.add_subplot()
        most = max(counts.values())
        for row, name in enumerate(names):
            for column, other in enumerate(names):
                count = counts[name, other]
                if name == other:
                    axes.scatter(column, row, s=14, color=COLORS["grid"][0])
                elif count:
                    shade = 0.15 + 0.75 * count / most
                    box = {
                        "facecolor": COLORS["validation"][0],
                        "alpha": shade,
                        "edgecolor": "none",
                    }
                    axes.text(column, row, f"{count}", ha="center", va="center", bbox=box)
        axes.set_xticks(range(len(names)), names, rotation=55, ha="left", rotation_mode="anchor")
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.tick_top()
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_title("modules in the row's folder that import from the column's")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure
