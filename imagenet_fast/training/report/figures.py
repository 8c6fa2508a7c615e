"""Confusion matrices and captioned images, as SVG for the report or as PNG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from imagenet_fast.base.plotting import PAGE_STYLE, PNG_STYLE, page_svg
from imagenet_fast.training.report.error_analysis import ErrorAnalysis
from imagenet_fast.training.report.input_images import InputImages

# Up to so many classes, cells have their numbers, and rows and columns their classes' names.
_NUMBERS = 16
_NAMES = 40
# Of more classes than this, neighbours share a cell: smaller cells could not be seen.
_CELLS = 100
_PAIRS = 15

_NAME_LENGTH = 18
_COLUMNS = 8

# Names of classes are no formulas, though two dollars may be in one.
_NO_MATH = {"text.parse_math": False}

# Red, green and blue of right and wrong answers, which must do on light and on dark pages.
_RIGHT, _WRONG = (0.25, 0.45, 0.92), (0.94, 0.5, 0.13)


class Confused(NamedTuple):
    """Images of a class that the model takes for another one.

    Attributes:
      label: the true class.
      answer: the other one.
      images: how many they are.
      of: how many images the true class has.
    """

    label: str
    answer: str
    images: int
    of: int


def most_confused(analysis: ErrorAnalysis, labels: Sequence[str]) -> list[Confused]:
    """Returns the pairs of classes with the most mistakes, these first; at most 15."""
    true, answers, images = analysis.confusion.T
    sizes = np.zeros(len(labels), np.int64)
    np.add.at(sizes, true, images)
    mistakes = np.flatnonzero(true != answers)
    first = mistakes[np.argsort(-images[mistakes], kind="stable")[:_PAIRS]]
    return [
        Confused(labels[label], labels[answer], int(count), int(sizes[label]))
        for label, answer, count in analysis.confusion[first]
    ]


def input_captions(inputs: InputImages, labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns what each input image is, or of what it has how much where images are mixed."""
    return [
        (labels[label],)
        if share == 1
        else (f"{_percent(share)} {labels[label]}", f"{_percent(1 - share)} {labels[partner]}")
        for label, partner, share in zip(inputs.labels, inputs.partners, inputs.shares)
    ]


def mistake_captions(analysis: ErrorAnalysis, labels: Sequence[str]) -> list[tuple[str, str]]:
    """Returns what each mistake is and what it was taken for, with the model's probabilities."""
    return [
        (f"{labels[label]} ({_percent(own)})", f"{labels[answer]} ({_percent(other)})")
        for label, answer, own, other in zip(
            analysis.labels,
            analysis.answers,
            analysis.label_probabilities,
            analysis.answer_probabilities,
        )
    ]


def classes_in_a_cell(classes: int) -> int:
    """Returns how many neighbouring classes share a row of the confusion matrix' drawing."""
    return -(-classes // _CELLS)


def confusion_svg(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns the confusion matrix as an SVG element for a page, in the page's colors."""
    with matplotlib.style.context([*PAGE_STYLE, _NO_MATH]):
        return page_svg(_confusion(analysis.confusion, labels))


def confusion_png(analysis: ErrorAnalysis, labels: Sequence[str]) -> bytes:
    """Returns the confusion matrix as a PNG file."""
    with matplotlib.style.context([*PNG_STYLE, _NO_MATH]):
        return _png(_confusion(analysis.confusion, labels))


def images_png(images: np.ndarray, captions: Sequence[str]) -> bytes:
    """Returns images in rows, each with its caption below, as a PNG file.

    Args:
      images: uint8 [images, height, width, 3], at least one.
      captions: of each, of one or several lines, which are cut where they are too long.
    """
    rows = -(-len(images) // _COLUMNS)
    lines = max(caption.count("\n") + 1 for caption in captions)
    below = 0.1 + 0.15 * lines  # As a fraction of an image.
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
    """Draws the shares of each class' images that got each answer.

    The stronger the color, the higher the share; its root for mistakes, which are to be seen.
    """
    classes = len(labels)
    pooled = _pool(confusion, classes)
    shares = pooled / np.maximum(pooled.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(shares), dtype=bool)
    pixels = np.empty([*shares.shape, 4])
    pixels[..., :3] = np.where(right[..., np.newaxis], _RIGHT, _WRONG)
    pixels[..., 3] = np.where(right, shares, np.sqrt(shares))
    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    # Cells as they are, which the page enlarges. The last ones may reach beyond the last class.
    edge = len(shares) * classes_in_a_cell(classes)
    edges = (0, edge, edge, 0)
    axes.imshow(pixels, interpolation="none", extent=edges, aspect="equal")
    axes.set_xlabel("answer")
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


def _write_names(axes: Axes, labels: Sequence[str]) -> None:
    names = [_short(label) for label in labels]
    places = np.arange(len(labels)) + 0.5
    size = 9 if len(labels) <= _NUMBERS else 6
    turned = max(map(len, names)) * len(names) > 60
    axes.set_xticks(places, names, rotation=90 if turned else 0, size=size)
    axes.set_yticks(places, names, size=size)


def _pool(confusion: np.ndarray, classes: int) -> np.ndarray:
    """Returns the matrix' sums over blocks of neighbouring classes, at most 100 x 100."""
    size = classes_in_a_cell(classes)
    cells = -(-classes // size)
    pooled = np.zeros([cells, cells], np.int64)
    rows, columns, images = confusion.T
    np.add.at(pooled, (rows // size, columns // size), images)
    return pooled


def _short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "\u2026"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    # The date and the version of matplotlib would make each file another one.
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()
