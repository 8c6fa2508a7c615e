"""Input images and error analysis of a run, saved in its directory and shown on TensorBoard."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from imagenet_fast.base.files import write_file
from imagenet_fast.base.option import MOST_PIXELS
from imagenet_fast.base.outside import read_arrays
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.training.logs.tensorboard import TensorBoard
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.step.calibration import BINS
from imagenet_fast.training.step.error_analysis import (
    FILES_OF_A_PAIR,
    LONGEST_NAME,
    PAIRS,
    ErrorAnalysis,
)

INPUTS_FILE = "input_images.npz"
ERROR_ANALYSIS_FILE = "examination.npz"

# More than a run saves; pages and figures show each.
_MOST_IMAGES = 100
_MOST_ENTRIES = 2**20  # of a confusion matrix

_Saved = TypeVar("_Saved", InputImages, ErrorAnalysis)


def load_inputs(model_dir: str, classes: int) -> InputImages | None:
    """Returns a run's saved input images; None if there are none, or the file is damaged."""
    return _load(to_path(model_dir, INPUTS_FILE), InputImages, classes)


def load_error_analysis(model_dir: str, classes: int) -> ErrorAnalysis | None:
    """Returns a run's saved error analysis; None if there is none, or the file is damaged."""
    return _load(to_path(model_dir, ERROR_ANALYSIS_FILE), ErrorAnalysis, classes)


def save_inputs(
    model_dir: str, inputs: InputImages, labels: Sequence[str], step: int, board: TensorBoard | None
) -> None:
    """Saves input images, after showing them on TensorBoard.

    Args:
      model_dir: the run's directory.
      inputs: the images.
      labels: the name of each class.
      step: weight updates so far.
      board: TensorBoard's files; None: not shown.
    """
    if board and len(inputs.images):
        # Imported only if used: matplotlib takes long to import.
        from imagenet_fast.training.report.figures import images_png, input_captions

        captions = map("\n".join, input_captions(inputs, labels))
        png = images_png(inputs.images, list(captions))
        board.show_image("train", step, "images/input_images", png)
    _save(to_path(model_dir, INPUTS_FILE), inputs)


def save_error_analysis(
    model_dir: str, analysis: ErrorAnalysis, labels: Sequence[str], board: TensorBoard | None
) -> None:
    """Saves an error analysis, after showing it on TensorBoard.

    Args:
      model_dir: the run's directory.
      analysis: of the run's model.
      labels: the name of each class.
      board: TensorBoard's files; None: not shown.
    """
    if board:
        from imagenet_fast.training.report.figures import (
            confusion_png,
            images_png,
            mistake_captions,
        )

        at = "validation", analysis.step
        board.show_image(*at, "images/confusion_matrix", confusion_png(analysis, labels))
        if len(analysis.images):
            captions = map("\nas ".join, mistake_captions(analysis, labels))
            png = images_png(analysis.images, list(captions))
            board.show_image(*at, "images/worst_mistakes", png)
        board.show_text(*at, "most_confused", _confused_table(analysis, labels))
    _save(to_path(model_dir, ERROR_ANALYSIS_FILE), analysis)


def remove_error_analysis(model_dir: str) -> None:
    """Removes the saved error analysis, because the model trains further."""
    to_path(model_dir, ERROR_ANALYSIS_FILE).unlink(missing_ok=True)


def _confused_table(analysis: ErrorAnalysis, labels: Sequence[str]) -> str:
    """Returns the pairs of classes with the most mistakes as a table in Markdown."""
    from imagenet_fast.training.report.figures import most_confused

    lines = ["| true class | predicted as | images |", "| --- | --- | --- |"]
    lines += [
        f"| {_cell(pair.label)} | {_cell(pair.prediction)} | {pair.images} of {pair.of} |"
        for pair in most_confused(analysis, labels)
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _load(path: Path, kind: type[_Saved], classes: int) -> _Saved | None:
    if not path.exists():
        return None
    try:
        arrays = read_arrays(path)
        images = arrays["images"]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            return None
        if len(images) > _MOST_IMAGES or not all(
            0 < side <= MOST_PIXELS for side in images.shape[1:]
        ):
            return None
        valid = all(_is_valid(name, array, len(images), classes) for name, array in arrays.items())
        return kind(**{name: _plain(array) for name, array in arrays.items()}) if valid else None
    except (KeyError, TypeError, ValueError):
        return None


def _is_valid(name: str, array: np.ndarray, images: int, classes: int) -> bool:
    """Whether a value of ``InputImages`` or ``ErrorAnalysis`` has its shape and range."""
    if name == "images":
        return True
    if name == "step":
        return array.shape == () and array.dtype.kind == "i"
    if name == "confusion":
        if array.dtype.kind != "i" or array.ndim != 2 or array.shape[1] != 3:
            return False
        few = len(array) <= min(classes**2, _MOST_ENTRIES)
        return few and array.min(initial=0) >= 0 and _in_range(array[:, :2], classes)
    if name == "calibration":
        bins = array.dtype.kind == "f" and array.shape in ((0, 3), (BINS, 3))
        return bins and bool((np.isfinite(array) & (array >= 0)).all())
    if name in ("files", "confused_files"):
        fits = array.shape in ((images,), (0,))
        if name == "confused_files":
            fits = array.ndim == 2 and len(array) <= PAIRS and array.shape[1] <= FILES_OF_A_PAIR
        return fits and array.dtype.kind == "U" and array.itemsize <= 4 * LONGEST_NAME
    if array.shape != (images,):
        return False
    if name in ("labels", "partners", "answers"):
        return array.dtype.kind == "i" and _in_range(array, classes)
    return array.dtype.kind == "f"


def _in_range(numbers: np.ndarray, classes: int) -> bool:
    return numbers.min(initial=0) >= 0 and numbers.max(initial=0) < classes


def _plain(array: np.ndarray) -> Any:
    return array if array.ndim else array.item()


def _save(path: Path, images: InputImages | ErrorAnalysis) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **vars(images))
    write_file(path, file.getvalue())
