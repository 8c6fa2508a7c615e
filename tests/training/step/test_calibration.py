"""Intervals, calibration and temperature against SciPy, scikit-learn and NumPy."""

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import tensorflow as tf
from sklearn.calibration import calibration_curve

from imagenet_fast import UserError
from imagenet_fast.training.step.calibration import (
    accuracy_interval,
    calibration_error,
    fitted_temperature,
    interval,
    no_temperature_sums,
    reliability,
    temperature_sums,
)


@pytest.mark.parametrize(
    ("right", "images"), [(0, 1), (1, 1), (0, 20), (3, 7), (354, 359), (38000, 50000), (100, 100)]
)
def test_interval_is_scipys_wilson(right, images):
    expected = scipy.stats.binomtest(right, images).proportion_ci(0.95, "wilson")
    found = interval(right / images, images)
    assert found == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)
    assert 0 <= found[0] <= right / images <= found[1] <= 1


def test_interval_without_images():
    assert interval(0.0, 0) == (0, 1)
    for row in ((None, None), (0.5, None), ("a", 3), (float("nan"), 3), (0.5, 0), (2.0, 3)):
        assert accuracy_interval(*row) is None
    assert accuracy_interval(0.5, 10.0) == [*interval(0.5, 10)]


@pytest.fixture(scope="module")
def answers():
    generator = np.random.default_rng(0)
    confidences = np.concatenate([generator.beta(5, 2, 3000), [0, 1 / 15, 0.4, 2 / 3, 1, 1]])
    return confidences, generator.random(len(confidences)) < confidences**1.5


def test_reliability_is_scikit_learns(answers):
    confidences, right = answers
    bins = reliability(confidences, right)
    assert bins.shape == (15, 3)
    assert bins[:, 0].sum() == len(right)
    images, confidence, hits = bins[bins[:, 0] > 0].T
    true, predicted = calibration_curve(right, confidences, n_bins=15)
    np.testing.assert_allclose(hits / images, true, rtol=1e-12)
    np.testing.assert_allclose(confidence / images, predicted, rtol=1e-12)


def test_bins_begin_above_their_lower_end():
    confidences = np.array([0, 1 / 30, 1 / 15, 0.4, 0.41, 0.95, 1])
    images = reliability(confidences, confidences > 0.5)[:, 0]
    assert np.flatnonzero(images).tolist() == [0, 5, 6, 14]
    assert images[[0, 14]].tolist() == [3, 2]


def test_calibration_error_is_that_of_the_paper(answers):
    """As in the authors' code: bins above their lower and up to their upper end."""
    confidences, right = answers
    expected = 0.0
    for low, high in zip(np.linspace(0, 1, 16)[:-1], np.linspace(0, 1, 16)[1:]):
        inside = (confidences > low) & (confidences <= high)
        if inside.any():
            gap = abs(right[inside].mean() - confidences[inside].mean())
            expected += inside.mean() * gap
    # The one of confidence 0 is in no bin there.
    found = calibration_error(reliability(confidences, right))
    assert found == pytest.approx(expected, abs=1e-6)
    assert 0.05 < found < 0.3
    assert calibration_error(np.zeros([15, 3])) == 0


def logits_and_labels(factor, images=2000, classes=7):
    """Logits whose best temperature is about the factor."""
    generator = np.random.default_rng(1)
    logits = 3 * generator.normal(size=(images, classes))
    labels = np.array([generator.choice(classes, p=p) for p in scipy.special.softmax(logits, 1)])
    return np.float32(factor * logits + 100), labels


def sums_of(logits, labels, weights, parts):
    split = (np.array_split(part, parts) for part in (logits, labels, weights))
    return sum(
        temperature_sums(tf.constant(z), tf.constant(y, tf.int32), tf.constant(w)).numpy()
        for z, y, w in zip(*split)
    )


@pytest.mark.parametrize("factor", [0.2, 1.0, 1.7, 9.0])
def test_temperature_is_that_of_a_minimizer(factor):
    logits, labels = logits_and_labels(factor)
    weights = np.float32(np.arange(len(labels)) % 10 > 0)
    counted = weights > 0

    def cross_entropy(inverse):
        scaled = logits[counted].astype("float64") * inverse
        return -scipy.special.log_softmax(scaled, 1)[
            np.arange(counted.sum()), labels[counted]
        ].sum()

    expected = scipy.optimize.minimize_scalar(
        cross_entropy, bracket=(0.5 / factor, 2 / factor), tol=1e-12
    )
    labels = np.where(counted, labels, -1)  # padding
    found = fitted_temperature(np.float64(sums_of(logits, labels, weights, parts=4)))
    assert 1 / found == pytest.approx(expected.x, rel=2e-6)
    assert found == pytest.approx(factor, rel=0.1)
    # In other batches, as of other replicas, the same.
    again = fitted_temperature(np.float64(sums_of(logits, labels, weights, parts=1)))
    assert again == pytest.approx(found, rel=1e-6)


def test_no_temperature():
    right = np.eye(5, dtype="float32")
    for logits, reason in ((right, "all predictions are right"), (-right, "no better at any")):
        sums = sums_of(logits, np.arange(5), np.ones(5, "float32"), 1)
        with pytest.raises(UserError, match=reason):
            fitted_temperature(sums)
    with pytest.raises(UserError, match="no temperature"):
        fitted_temperature(sums * np.nan)
    assert no_temperature_sums(3).shape[1:] == sums.shape
