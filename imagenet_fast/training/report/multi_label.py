"""Average precision, F1 and thresholds of data whose images have several labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from imagenet_fast.training.report.class_metrics import fraction_of

# The threshold of rows of metrics, and of classes of which nothing is known.
DEFAULT_THRESHOLD = 0.5


class MultiLabelClass(NamedTuple):
    """How well a model recognizes one of several labels; None: undefined.

    Attributes:
      name: the class.
      images: number of images that have it.
      average_precision: area under its precision-recall curve; None without images.
      threshold: probability from which on it is predicted.
      recall: fraction of its images for which it is predicted; None without images.
      precision: fraction of right predictions; None without predictions.
      f1: harmonic mean of both; None without images and predictions.
    """

    name: str
    images: int
    average_precision: float | None
    threshold: float
    recall: float | None
    precision: float | None
    f1: float | None


def average_precisions(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the average precision of each class, float64 [classes]; NaN without images.

    It is the sum of precision times the increase of recall over all thresholds, as scikit-learn's
    ``average_precision_score``: equal scores are one threshold, and nothing is interpolated.

    Args:
      scores: [images, classes], higher for images of the class; NaN counts as the lowest.
      labels: [images, classes], 1 or True for images of the class.
    """
    return np.array([_average_precision(*pair) for pair in zip(_sortable(scores).T, labels.T)])


def best_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the threshold of each class with the highest F1, float64 [classes].

    Each is a score: the class is predicted from it on. Of equal ones it is the highest; of classes
    without images 1/2.
    """
    thresholds = np.full(labels.shape[1], DEFAULT_THRESHOLD)
    for number, (own, wanted) in enumerate(zip(_sortable(scores).T, labels.T)):
        ends, hits, predicted = _curve(own, wanted)
        if hits.size and hits[-1]:
            thresholds[number] = ends[np.argmax(2 * hits / (predicted + hits[-1]))]
    return np.maximum(thresholds, 0.0)  # -inf where scores are NaN


def f1_scores(
    scores: np.ndarray, labels: np.ndarray, thresholds: np.ndarray
) -> tuple[float, float]:
    """Returns the micro and the macro average of F1, as scikit-learn's ``f1_score``.

    ``thresholds`` are [classes] or one: a class is predicted from it on.
    """
    right, predicted, wanted = _counts(scores, labels, thresholds)
    total = predicted + wanted
    f1 = np.divide(2 * right, total, out=np.zeros(len(total)), where=total > 0)
    return float(2 * right.sum() / max(total.sum(), 1)), float(f1.mean())


def multi_label_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns ``map``, ``f1_micro`` and ``f1_macro``.

    ``map`` is the mean of the average precisions of classes with images; F1 is at thresholds of
    1/2.
    """
    precisions = average_precisions(scores, labels)
    known = precisions[~np.isnan(precisions)]
    micro, macro = f1_scores(scores, labels, np.array(DEFAULT_THRESHOLD))
    return {"map": float(known.mean()) if known.size else 0.0, "f1_micro": micro, "f1_macro": macro}


def multi_label_classes(
    scores: np.ndarray, labels: np.ndarray, names: Sequence[str], thresholds: np.ndarray
) -> list[MultiLabelClass]:
    """Returns the metrics of each class, in the order of the classes."""
    right, predicted, wanted = _counts(scores, labels, thresholds)
    return [
        MultiLabelClass(
            name,
            int(images),
            None if np.isnan(precision) else float(precision),
            float(threshold),
            fraction_of(hits, images),
            fraction_of(hits, guesses),
            fraction_of(2 * hits, images + guesses),
        )
        for name, precision, threshold, hits, guesses, images in zip(
            names, average_precisions(scores, labels), thresholds, right, predicted, wanted
        )
    ]


def _counts(
    scores: np.ndarray, labels: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns right predictions, predictions and images of each class, int64 [classes]."""
    predicted, wanted = _sortable(scores) >= thresholds, labels > 0
    return (predicted & wanted).sum(0), predicted.sum(0), wanted.sum(0)


def _sortable(scores: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(scores), -np.inf, scores)


def _average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    _, hits, predicted = _curve(scores, labels)
    if not hits.size or not hits[-1]:
        return np.nan
    return float(np.sum(np.diff(hits, prepend=0) * hits / predicted) / hits[-1])


def _curve(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the scores of a class, descending, each once, and counts of the images from it on.

    The counts are those that have the class, and all.
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)])
    return ordered[last], np.cumsum(labels[order] > 0)[last], last + 1
