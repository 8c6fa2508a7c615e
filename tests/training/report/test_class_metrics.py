"""Metrics of each class, against scikit-learn's classification_report."""

import numpy as np
import pytest
from sklearn.metrics import classification_report

from imagenet_fast.training.report.class_metrics import class_metrics, mean_metrics, worst_first

LABELS = ("cat", "dog", "wolf", "yak", "emu", "ox")


@pytest.fixture(scope="module")
def predictions():
    """Classes and predictions of 200 images: no emu, no image predicted as a yak, no right ox."""
    generator = np.random.default_rng(3)
    true = generator.choice([0, 1, 2, 3, 5], 200, p=[0.4, 0.3, 0.2, 0.05, 0.05])
    predicted = np.where(generator.random(200) < 0.6, true, generator.choice([0, 1, 2, 4, 5], 200))
    predicted[predicted == 3] = 1
    predicted[(true == 5) & (predicted == 5)] = 0
    return true, predicted


@pytest.fixture(scope="module")
def metrics(predictions):
    pairs, images = np.unique(np.stack(predictions, 1), axis=0, return_counts=True)
    return class_metrics(np.column_stack([pairs, images]), LABELS)


def test_against_scikit_learn(predictions, metrics):
    expected = classification_report(
        *predictions,
        labels=range(6),
        target_names=LABELS,
        output_dict=True,
        zero_division=np.nan,
    )
    # Of the classes that are there or predicted; a precision without predictions counts as 0.
    macro = classification_report(*predictions, output_dict=True, zero_division=0)["macro avg"]
    expected["macro avg"].update({name: macro[name] for name in ("precision", "f1-score")})
    assert [row.name for row in metrics] == list(LABELS)
    for row in [*metrics, mean_metrics(metrics)]:
        theirs = expected["macro avg" if row.name.startswith("mean") else row.name]
        assert row.images == theirs["support"]
        for name, value in (
            ("recall", row.recall),
            ("precision", row.precision),
            ("f1-score", row.f1),
        ):
            found = np.nan if value is None else value
            assert found == pytest.approx(theirs[name], nan_ok=True), (row.name, name)
    for row in metrics:
        within = (
            row.recall is None or row.recall_interval[0] <= row.recall <= row.recall_interval[1]
        )
        assert within and (row.recall is None) == (row.recall_interval is None)
    emu, yak, ox = (metrics[LABELS.index(name)] for name in ("emu", "yak", "ox"))
    assert (emu.recall, emu.precision, emu.f1) == (None, 0.0, 0.0)
    assert (yak.recall, yak.precision, yak.f1) == (0.0, None, 0.0)
    assert (ox.recall, ox.precision, ox.f1) == (0.0, 0.0, 0.0)


def test_worst_first(metrics):
    names = [row.name for row in worst_first(metrics)]
    assert names[:2] in (["yak", "ox"], ["ox", "yak"])
    assert names[-1] == "emu"
    recalls = [row.recall for row in worst_first(metrics)][:-1]
    assert recalls == sorted(recalls)


def test_no_images():
    (row,) = class_metrics(np.zeros([0, 3], np.int64), ("cat",))
    assert row == ("cat", 0, None, None, None, None)
    assert mean_metrics([row]) == ("mean of the classes", 0, None, None, None, None)
