"""How the studies' pictures look."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.style
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import PLOT_STYLE, svg

COLORS = ("#2f5fe0", "#f0913a", "#0f9d83", "#8250c8", "#667085", "#d03030", "#101828")

_STYLE = [*PLOT_STYLE, {"axes.titlesize": 10, "legend.fontsize": 8}]


def drawn(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Returns a picture as SVG.

    Args:
      draw: draws it.
      size: in inches.
    """
    with matplotlib.style.context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return svg(figure)
