"""How the studies' pictures look."""

from __future__ import annotations

COLORS = ("#2f5fe0", "#f0913a", "#0f9d83", "#8250c8", "#667085", "#d03030", "#101828")

STYLE = {
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
