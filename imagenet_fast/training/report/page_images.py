"""HTML of the report's images: inputs, confusion matrix, worst mistakes."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from imagenet_fast.base import html_page
from imagenet_fast.training.report import formats
from imagenet_fast.training.report.class_metrics import class_metrics, mean_metrics, worst_first
from imagenet_fast.training.report.figures import (
    classes_in_a_cell,
    confusion_svg,
    input_captions,
    mistake_captions,
    most_confused,
    reliability_svg,
)
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.step.calibration import calibration_error
from imagenet_fast.training.step.error_analysis import ErrorAnalysis

CLASSES = 50
# Images of at least this height are JPEGs in the page: PNGs would be ten times as large.
_LEAST_JPEG = 64

STYLE = """
.confusion { max-width: 520px; margin: 0 auto; }
.pairs td, .pairs thead th { text-align: right; padding: 6px 0 6px 12px; }
.pairs .name, .pairs thead th:first-child { text-align: left; }
.pairs thead th:first-child { padding-left: 0; }
.pairs td:last-child { white-space: nowrap; }
.pairs th, .pairs thead th { width: auto; color: var(--muted); }
.pairs .files td, .images .file { color: var(--muted); overflow-wrap: anywhere; }
.pairs .files td { border-top: 0; padding-top: 0; white-space: normal; }
.pairs tbody tr:first-child > * { border-top: 1px solid var(--grid); }
"""


def input_images(inputs: InputImages, labels: Sequence[str]) -> str:
    """Returns training images as the model saw them, with their classes, as HTML."""
    captions = ["<br>".join(map(html.escape, lines)) for lines in input_captions(inputs, labels)]
    return _images(inputs.images, captions)


def confusion_matrix(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns a drawing of the confusion matrix, as HTML."""
    images = int(analysis.confusion[:, 2].sum())
    title = html.escape(f"confusion matrix of {images} images", quote=True)
    size = classes_in_a_cell(len(labels))
    pooled = f"<span>a cell: {size} x {size} neighbouring classes</span>" if size > 1 else ""
    note = (
        '<p class="keys"><span>blue: right, as a fraction of the true class</span>'
        f"<span>orange: wrong, square root of the fraction</span>{pooled}</p>"
    )
    drawing = confusion_svg(analysis, labels)
    return f'{note}<div class="confusion" role="img" aria-label="{title}">{drawing}</div>'


def confused_pairs(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns a table of the pairs of classes with the most mistakes, as HTML."""
    pairs = most_confused(analysis, labels)
    if not pairs:
        return "<p>No image was mispredicted.</p>"
    lines = "".join(
        f'<tr><th scope="row">{html.escape(pair.label)}</th>'
        f'<td class="name">{html.escape(pair.prediction)}</td>'
        f"<td>{pair.images:,} of {pair.of:,}</td></tr>{_files(pair.files)}"
        for pair in pairs
    )
    heads = '<th>True class</th><th class="name">Predicted as</th><th>Images</th>'
    return f'<table class="pairs"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'


def _files(names: Sequence[str]) -> str:
    """Returns a row with the names of images; empty: none are known."""
    if not names:
        return ""
    text = html.escape(", ".join(names))
    return f'<tr class="files"><td colspan="3" class="name">{text}</td></tr>'


def reliability_diagram(analysis: ErrorAnalysis) -> str:
    """Returns a reliability diagram with the expected calibration error, as HTML."""
    error = calibration_error(analysis.calibration)
    note = (
        f'<p class="keys"><span>expected calibration error {formats.percent(error)}</span>'
        "<span>bars: accuracy of the images of that confidence, the predicted class's probability; "
        "dots: at their mean confidence; on the dashed line, probabilities are right</span></p>"
    )
    drawing = reliability_svg(analysis)
    return f'{note}<div role="img" aria-label="reliability diagram">{drawing}</div>'


def class_table(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns a table of the classes' metrics, those of the lowest recall first, as HTML."""
    metrics = class_metrics(analysis.confusion, labels)
    shown = worst_first(metrics)[:CLASSES]
    lines = "".join(
        f'<tr><th scope="row">{html.escape(row.name)}</th><td>{formats.percent(row.recall)}</td>'
        f"<td>{formats.interval(row.recall_interval)}</td>"
        + "".join(f"<td>{formats.percent(value)}</td>" for value in (row.precision, row.f1))
        + f"<td>{row.images:,}</td></tr>"
        for row in [*shown, mean_metrics(metrics)]
    )
    names = ("Class", "Recall", "95% interval", "Precision", "F1", "Images")
    heads = "".join(f"<th>{name}</th>" for name in names)
    which = formats.count(len(metrics), "class", "classes") + ", lowest recall first"
    if len(shown) < len(metrics):
        which = f"the {len(shown)} of {len(metrics):,} classes with the lowest recall"
    return (
        f'<p class="keys"><span>{which}; recall is the accuracy on a class</span></p>'
        f'<table class="pairs"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
    )


def worst_mistakes(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns the worst mispredicted images with both classes, as HTML."""
    files = analysis.files
    if len(files) != len(analysis.images):
        files = np.full(len(analysis.images), "")
    captions = [
        f"<b>{html.escape(label)}</b><br>predicted as {html.escape(prediction)}"
        + (f'<br><span class="file">{html.escape(file)}</span>' if file else "")
        for (label, prediction), file in zip(mistake_captions(analysis, labels), files.tolist())
    ]
    return _images(analysis.images, captions)


def _images(images: np.ndarray, captions: Iterable[str]) -> str:
    """Returns images with captions below, as HTML."""
    return (
        '<div class="images">'
        + "".join(
            f"<div>{_image(image)}{caption}</div>" for image, caption in zip(images, captions)
        )
        + "</div>"
    )


def _image(image: np.ndarray) -> str:
    """Returns an image, uint8 [height, width, 3], as an ``img`` element with its data."""
    small = len(image) < _LEAST_JPEG
    kind = "PNG" if small else "JPEG"
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **({} if small else {"quality": 88}))
    return html_page.image(file.getvalue(), kind.lower(), small)
