"""Confusion matrices and captioned images, as SVG for the report or as PNG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import PAGE_STYLE, PNG_STYLE, page_svg, without_glyph_warnings
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.step.calibration import BINS
from imagenet_fast.training.step.error_analysis import ErrorAnalysis, confused_pairs

# With at most this many classes, cells show numbers, and rows and columns show class names.
_NUMBERS = 16
_NAMES = 40
# With more classes than this, neighbours share a cell: smaller cells would not be visible.
_CELLS = 100

_NAME_LENGTH = 18
_COLUMNS = 8

# Dollar signs in class names are not formulas.
_NO_MATH = {"text.parse_math": False}

# Red, green and blue of right and wrong predictions, visible on light and on dark pages.
_RIGHT, _WRONG = (0.25, 0.45, 0.92), (0.94, 0.5, 0.13)


class Confused(NamedTuple):
    """Images of a class that the model predicts as another.

    Attributes:
      label: the true class.
      prediction: the predicted class.
      images: number of these images.
      of: number of images of the true class.
      files: names of some of them.
    """

    label: str
    prediction: str
    images: int
    of: int
    files: tuple[str, ...] = ()


def most_confused(analysis: ErrorAnalysis, labels: Sequence[str]) -> list[Confused]:
    """Returns the at most 15 pairs of classes with the most mistakes, in descending order."""
    true, _, images = analysis.confusion.T
    sizes = np.zeros(len(labels), np.int64)
    np.add.at(sizes, true, images)
    pairs = confused_pairs(analysis.confusion)
    files = analysis.confused_files
    if len(files) != len(pairs):
        files = np.full([len(pairs), 0], "")
    return [
        Confused(
            labels[label],
            labels[answer],
            int(count),
            int(sizes[label]),
            tuple(name for name in own.tolist() if name),
        )
        for (label, answer, count), own in zip(pairs, files)
    ]


def input_captions(inputs: InputImages, labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns each input image's class or, if mixed, both classes with their fractions."""
    return [
        (labels[label],)
        if weight == 1
        else (f"{_percent(weight)} {labels[label]}", f"{_percent(1 - weight)} {labels[partner]}")
        for label, partner, weight in zip(inputs.labels, inputs.partners, inputs.shares)
    ]


def mistake_captions(analysis: ErrorAnalysis, labels: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each mistake's true and predicted class, with the model's probabilities."""
    return [
        (f"{labels[label]} ({_percent(p_label)})", f"{labels[answer]} ({_percent(p_answer)})")
        for label, answer, p_label, p_answer in zip(
            analysis.labels,
            analysis.answers,
            analysis.label_probabilities,
            analysis.answer_probabilities,
        )
    ]


def classes_in_a_cell(classes: int) -> int:
    """Returns the number of neighbouring classes that share a row of the drawn matrix."""
    return -(-classes // _CELLS)


def confusion_svg(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns the confusion matrix as an SVG element for a page, in the page's colors."""
    with matplotlib.style.context([*PAGE_STYLE, _NO_MATH]):
        return page_svg(_confusion(analysis.confusion, labels))


def confusion_png(analysis: ErrorAnalysis, labels: Sequence[str]) -> bytes:
    """Returns the confusion matrix as a PNG file."""
    with matplotlib.style.context([*PNG_STYLE, _NO_MATH]):
        return _png(_confusion(analysis.confusion, labels))


def reliability_svg(analysis: ErrorAnalysis) -> str:
    """Returns the reliability diagram as an SVG element for a page, in the page's colors."""
    with matplotlib.style.context([*PAGE_STYLE, _NO_MATH]):
        return page_svg(_reliability(analysis.calibration))


def images_png(images: np.ndarray, captions: Sequence[str]) -> bytes:
    """Returns images in rows, each with its caption below, as a PNG file.

    Args:
      images: uint8 [images, height, width, 3], at least one.
      captions: one or several lines for each image; long lines are cut.
    """
    rows = -(-len(images) // _COLUMNS)
    lines = max(caption.count("\n") + 1 for caption in captions)
    below = 0.1 + 0.15 * lines  # as a fraction of an image
    with matplotlib.style.context([*PNG_STYLE, _NO_MATH]):
        color = matplotlib.rcParams["axes.labelcolor"]
        figure = Figure(figsize=(1.25 * _COLUMNS, 1.25 * (1 + below) * rows))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for index, (image, caption) in enumerate(zip(images, captions)):
            row, column = divmod(index, _COLUMNS)
            top = row * (1 + below)
            extent = (column + 0.03, column + 0.97, top + 0.97, top + 0.03)
            axes.imshow(image, extent=extent, interpolation="nearest")
            text = "\n".join(_short(line) for line in caption.split("\n"))
            axes.text(column + 0.5, top + 1, text, ha="center", va="top", size=8, color=color)
        axes.set_xlim(0, _COLUMNS)
        axes.set_ylim(rows * (1 + below), 0)
        return _png(figure)


def _confusion(confusion: np.ndarray, labels: Sequence[str]) -> Figure:
    """Draws the fraction of each class' images with each prediction.

    Opacity is the fraction; for mistakes its square root, which makes them visible.
    """
    classes = len(labels)
    pooled = _pool(confusion, classes)
    fractions = pooled / np.maximum(pooled.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(fractions), dtype=bool)
    pixels = np.empty([*fractions.shape, 4])
    pixels[..., :3] = np.where(right[..., np.newaxis], _RIGHT, _WRONG)
    pixels[..., 3] = np.where(right, fractions, np.sqrt(fractions))
    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    # One pixel per cell, which the page enlarges. The last cells may extend beyond the last class.
    edge = len(fractions) * classes_in_a_cell(classes)
    edges = (0, edge, edge, 0)
    axes.imshow(pixels, interpolation="none", extent=edges, aspect="equal")
    axes.set_xlabel("prediction")
    axes.set_ylabel("true class")
    axes.set_xlim(0, classes)
    axes.set_ylim(classes, 0)
    for spine in axes.spines.values():
        spine.set_visible(True)
    if classes <= _NAMES:
        _write_names(axes, labels)
    if classes <= _NUMBERS:
        for row, column, count in confusion:
            strong = pixels[row, column, 3] > 0.5
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{count:,}",
                ha="center",
                va="center",
                size=8,
                color="#ffffff" if strong else matplotlib.rcParams["axes.labelcolor"],
            )
    return figure


def _reliability(bins: np.ndarray) -> Figure:
    """Draws the accuracy of each bin over its confidence, and below it the bin's images."""
    images, confidences, right = bins.T
    filled = images > 0
    middles = (np.arange(BINS) + 0.5) / BINS
    figure = Figure(figsize=(5.0, 4.2), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    own: dict[str, Any] = {"width": 0.9 / BINS, "color": _RIGHT}
    axes.bar(middles[filled], right[filled] / images[filled], alpha=0.55, **own)
    axes.plot([0, 1], [0, 1], color=matplotlib.rcParams["axes.labelcolor"], lw=0.9, ls=(0, (4, 3)))
    axes.plot(
        confidences[filled] / images[filled],
        right[filled] / images[filled],
        marker="o",
        markersize=4,
        lw=0,
        color=_WRONG,
    )
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.grid(axis="y")
    below.bar(middles, images / max(images.sum(), 1), alpha=0.55, **own)
    below.set_ylabel("images")
    below.set_xlabel("confidence")
    below.set_xlim(0, 1)
    for axis in (axes.yaxis, below.xaxis, below.yaxis):
        axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0%}"))
    return figure


def _write_names(axes: Axes, labels: Sequence[str]) -> None:
    names = [_short(label) for label in labels]
    ticks = np.arange(len(labels)) + 0.5
    size = 9 if len(labels) <= _NUMBERS else 6
    turned = max(map(len, names)) * len(names) > 60
    axes.set_xticks(ticks, names, rotation=90 if turned else 0, size=size)
    axes.set_yticks(ticks, names, size=size)


def _pool(confusion: np.ndarray, classes: int) -> np.ndarray:
    """Returns the matrix summed over blocks of neighbouring classes, at most 100 x 100."""
    size = classes_in_a_cell(classes)
    cells = -(-classes // size)
    pooled = np.zeros([cells, cells], np.int64)
    rows, columns, images = confusion.T
    np.add.at(pooled, (rows // size, columns // size), images)
    return pooled


def _short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "\u2026"


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}"


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    # Without matplotlib's version, so that equal figures are equal files.
    with without_glyph_warnings():
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()
