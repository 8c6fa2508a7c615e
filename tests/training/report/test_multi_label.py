"""Metrics of images with several labels, against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from imagenet_fast.training.report.multi_label import (
    average_precisions,
    best_thresholds,
    f1_scores,
    multi_label_classes,
    multi_label_metrics,
)


@pytest.fixture(params=["many scores", "ties"])
def scored(request):
    random = np.random.RandomState(0)
    labels = random.rand(500, 6) < [0.02, 0.1, 0.3, 0.5, 0.9, 1.0]
    scores = (0.3 * labels + random.rand(500, 6)).astype(np.float32) / 1.3
    return (np.round(scores, 1) if request.param == "ties" else scores), labels


def test_average_precision(scored):
    expected = average_precision_score(scored[1], scored[0], average=None)
    np.testing.assert_allclose(average_precisions(*scored), expected, atol=1e-12)


def test_classes_without_images_do_not_count():
    scores, labels = np.array([[0.9, 0.8], [0.1, 0.7]]), np.array([[1, 0], [0, 0]])
    assert np.isnan(average_precisions(scores, labels)).tolist() == [False, True]
    assert multi_label_metrics(scores, labels)["map"] == 1
    assert best_thresholds(scores, labels).tolist() == [0.9, 0.5]
    empty = multi_label_metrics(np.zeros([0, 2]), np.zeros([0, 2]))
    assert empty == {"map": 0, "f1_micro": 0, "f1_macro": 0}


def test_f1(scored):
    scores, labels = scored
    thresholds = np.linspace(0.2, 0.8, 6)
    for own in (np.array(0.5), thresholds):
        micro, macro = f1_scores(scores, labels, own)
        assert micro == pytest.approx(f1_score(labels, scores >= own, average="micro"))
        assert macro == pytest.approx(f1_score(labels, scores >= own, average="macro"))
    rows = multi_label_classes(scores, labels, list("abcdef"), thresholds)
    expected = f1_score(labels, scores >= thresholds, average=None)
    assert [row.f1 for row in rows] == pytest.approx(expected)
    assert [row.images for row in rows] == labels.sum(0).tolist()


def test_thresholds_have_the_highest_f1(scored):
    scores, labels = scored
    thresholds = best_thresholds(scores, labels)
    reached = f1_score(labels, scores >= thresholds, average=None)
    for number in range(6):
        precision, recall, _ = precision_recall_curve(labels[:, number], scores[:, number])
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        assert reached[number] == pytest.approx(f1.max())


def test_nan_is_the_lowest_score():
    scores, labels = np.array([[np.nan], [0.2], [0.1]]), np.array([[1], [1], [0]])
    expected = average_precision_score([1, 1, 0], [-1, 0.2, 0.1])
    assert average_precisions(scores, labels)[0] == pytest.approx(expected)


def test_thresholds_of_scores_that_are_not_numbers_can_be_stored():
    scores = np.array([[np.nan, 0.25], [np.nan, 0.75]], np.float32)
    labels = np.array([[True, False], [True, True]])
    np.testing.assert_array_equal(best_thresholds(scores, labels), [0.0, 0.75])
