"""Styles of all plots, and their conversion to reproducible SVG."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any, Union

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

# The colours on a light and on a dark page, by name.
COLORS = {
    "muted": ("#667085", "#98a3b5"),
    "grid": ("#e2e6ec", "#2f3846"),
    "train": ("#f0913a", "#f2a65e"),
    "validation": ("#2f5fe0", "#7da2ff"),
    "rate": ("#8250c8", "#b592f0"),
    "speed": ("#0f9d83", "#45cdb1"),
}

# Plots are drawn in placeholder colours, which page_svg replaces by CSS variables, so that they
# adapt to dark pages.
SENTINELS = {name: f"#0000{number:02x}" for number, name in enumerate(COLORS, start=0xA1)}

_PAGE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": SENTINELS["grid"],
    "axes.labelcolor": SENTINELS["muted"],
    "axes.labelsize": 9,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.015,
    "font.family": ["DejaVu Sans"],
    "grid.color": SENTINELS["grid"],
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",
    "xtick.color": SENTINELS["muted"],
    "xtick.labelsize": 9,
    "xtick.major.pad": 6,
    "xtick.major.size": 0,
    "ytick.color": SENTINELS["muted"],
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
_LIGHT = {sentinel: COLORS[name][0] for name, sentinel in SENTINELS.items()}

# For matplotlib.style.context.
Style = list[Union[str, dict[str, Any]]]

# For plots in a page, in the placeholder colours.
PAGE_STYLE: Style = ["default", _PAGE]
# For the same plots as SVG files; text as paths does not depend on installed fonts.
FILE_STYLE: Style = [*PAGE_STYLE, {"svg.fonttype": "path"}]
# For the same plots as PNG files, in the colours of a light page.
PNG_STYLE: Style = [
    "default",
    {
        name: _LIGHT.get(value, value) if isinstance(value, str) else value
        for name, value in _PAGE.items()
    },
]
# For plots of measurements.
PLOT_STYLE: Style = [
    "default",
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.prop_cycle": cycler(color=["#c2410c", "#475467", "#0e7490", "#6d28d9", "#4d7c0f"]),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 9,
        "grid.color": COLORS["grid"][0],
        "grid.linewidth": 0.6,
    },
]


@contextlib.contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Hides a warning for each character that the font lacks, as in Chinese class names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def svg(figure: Figure) -> str:
    """Returns a figure as the content of an SVG file, in the colours of a light page."""
    text = _saved(figure, metadata={"Date": None})
    for sentinel, color in _LIGHT.items():
        text = text.replace(sentinel, color)
    return text


def page_svg(figure: Figure) -> str:
    """Returns a figure in ``PAGE_STYLE`` as an ``svg`` element with the page's size and colors."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _saved(figure, transparent=True, metadata=nothing)
    text = text[text.index("<svg") :]
    # Group ids would clash between the page's figures, and nothing refers to them.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r">\s+<", "><", text)
    for name, color in SENTINELS.items():
        text = text.replace(color, f"var(--{name})")
    return re.sub(r"\s+", " ", text).strip()


def _saved(figure: Figure, **options: Any) -> str:
    file = io.StringIO()
    # Without a salt, the ids of clip paths are random.
    with matplotlib.rc_context({"svg.hashsalt": "imagenet_fast"}), without_glyph_warnings():
        figure.savefig(file, format="svg", **options)
    return file.getvalue()
