"""How the studies' pictures look."""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib.style
from matplotlib.figure import Figure

COLORS = ("#2f5fe0", "#f0913a", "#0f9d83", "#8250c8", "#667085", "#d03030", "#101828")

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e2e6ec",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    # The same log gives the same file.
    "svg.hashsalt": "imagenet_fast",
}


def drawn(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Returns a picture as SVG.

    Args:
      draw: draws it.
      size: in inches.
    """
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
