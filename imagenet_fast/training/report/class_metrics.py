"""Precision, recall and F1 score of each class, from a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from imagenet_fast.training.step.calibration import interval


class ClassMetrics(NamedTuple):
    """How well a model recognizes a class; None: undefined.

    Attributes:
      name: the class.
      images: number of its images, the support.
      recall: fraction of them that are predicted as the class, its accuracy; None without images.
      precision: fraction of the images predicted as the class that are of it; None if no image is.
      f1: harmonic mean of both; 0 if no prediction is right.
      recall_interval: the recall's 95% interval; None without images, and of a mean.
    """

    name: str
    images: int
    recall: float | None
    precision: float | None
    f1: float | None
    recall_interval: tuple[float, float] | None = None


def class_metrics(confusion: np.ndarray, labels: Sequence[str]) -> list[ClassMetrics]:
    """Returns the metrics of each class, in the order of the classes.

    Args:
      confusion: int64 [entries, 3]: true class, predicted class and number of images.
      labels: the name of each class.
    """
    true, predicted, images = confusion.T
    of_class, of_prediction, right = (np.zeros(len(labels), np.int64) for _ in range(3))
    np.add.at(of_class, true, images)
    np.add.at(of_prediction, predicted, images)
    correct = true == predicted
    np.add.at(right, true[correct], images[correct])
    return [
        ClassMetrics(
            name,
            int(count),
            fraction_of(hits, count),
            fraction_of(hits, guesses),
            fraction_of(2 * hits, count + guesses),
            interval(float(hits / count), int(count)) if count else None,
        )
        for name, count, guesses, hits in zip(labels, of_class, of_prediction, right)
    ]


def worst_first(metrics: Sequence[ClassMetrics]) -> list[ClassMetrics]:
    """Returns the classes by ascending recall, then precision; those without images last."""
    return sorted(
        metrics, key=lambda row: (row.recall is None, row.recall or 0.0, row.precision or 0.0)
    )


def mean_metrics(metrics: Sequence[ClassMetrics]) -> ClassMetrics:
    """Returns the means over the classes for which each metric is defined, and all images.

    The precision of a class with images that is never predicted is 0 here, as in scikit-learn's
    macro average.
    """

    def mean(values: list[float | None]) -> float | None:
        defined = [value for value in values if value is not None]
        return float(np.mean(defined)) if defined else None

    return ClassMetrics(
        "mean of the classes",
        sum(row.images for row in metrics),
        mean([row.recall for row in metrics]),
        mean([row.precision or 0.0 for row in metrics if row.f1 is not None]),
        mean([row.f1 for row in metrics]),
    )


def fraction_of(part: np.int64, whole: np.int64) -> float | None:
    """Returns a fraction; None: of nothing."""
    return float(part / whole) if whole else None
