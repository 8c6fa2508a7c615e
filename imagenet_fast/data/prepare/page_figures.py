"""Thumbnails and histograms of the data page."""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Callable

import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from imagenet_fast.base import html_page
from imagenet_fast.base.counted import counted
from imagenet_fast.base.plotting import PAGE_STYLE, SENTINELS, page_svg

# Images up to this side in pixels are stored at full size and enlarged by the browser.
_PIXELATED = 32
_ASPECTS = {0.25: "1:4", 0.5: "1:2", 0.75: "3:4", 1.0: "1:1", 1.333: "4:3", 2.0: "2:1", 4.0: "4:1"}


def thumbnail(data: bytes, side: int, quality: int, crop: bool) -> str:
    """Returns an ``img`` element with a thumbnail of an image, or of its central square."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # about metadata, as in prepare
        image: Image.Image = Image.open(io.BytesIO(data))
    small = max(image.size) <= _PIXELATED
    # JPEGs are decoded at a fraction of their size.
    image.draft(None, (2 * side, 2 * side))
    if crop and min(image.size) > side:
        image = ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC)
    elif not small:
        image.thumbnail((side, side), Image.Resampling.BICUBIC)
    image = image.copy()  # The opened file would keep all metadata of its header.
    image.info.clear()
    file = io.BytesIO()
    if small:
        image.save(file, "PNG", optimize=True)
        return html_page.image(file.getvalue(), "png", small=True)
    image.save(file, "JPEG", quality=quality, optimize=True)
    return html_page.image(file.getvalue(), "jpeg")


def histogram(values: np.ndarray, x: str, y: str, title: str) -> str:
    """Returns a histogram of integers, without the few that are far above the others."""
    most = int(values.max())
    top = int(np.quantile(values, 0.995, method="higher"))
    top = most if most <= 1.5 * top else top
    least = int(values.min())
    step = max(1, -(-(top - least + 1) // 40))
    edges = np.arange(least, top + step + 1, step) - 0.5
    counts, _ = np.histogram(values, edges)

    def draw(axes: Axes) -> None:
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.92, align="edge", color=_blue())
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))

    above = int((values > edges[-1]).sum())
    note = f"{counted(above, 'more is', 'more are')} above, up to {most:,}."
    return _plot(draw, x, y, title) + (f'<p class="note">{note}</p>' if above else "")


def aspect_histogram(aspect: np.ndarray) -> str:
    """Returns a histogram of aspect ratios, width / height."""
    edges = 2.0 ** (np.arange(-33, 34) / 16)
    counts, _ = np.histogram(np.clip(aspect, edges[0], edges[-1]), edges)

    def draw(axes: Axes) -> None:
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.92, align="edge", color=_blue())
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(list(_ASPECTS)))
        axes.xaxis.set_major_formatter(matplotlib.ticker.FixedFormatter(list(_ASPECTS.values())))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())

    return _plot(draw, "width : height", "images", "images by their aspect ratio")


def _blue() -> str:
    return SENTINELS["validation"]


def _plot(draw: Callable[[Axes], None], x: str, y: str, title: str) -> str:
    with matplotlib.style.context(PAGE_STYLE):
        figure = Figure(figsize=(5.0, 1.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
        picture = page_svg(figure)
    return f'<div class="drawing" role="img" aria-label="{html.escape(title)}">{picture}</div>'
