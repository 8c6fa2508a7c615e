"""What a model gets wrong, against the model asked image by image."""

import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf
from confusion_entries import entries

from imagenet_fast import Config, build_model
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.info import read_info
from imagenet_fast.training.report import error_analysis
from imagenet_fast.training.report.error_analysis import analyze_errors

JOB = pathlib.Path(__file__).with_name("error_analysis_job.py")
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "none",
    "batch_size": 32,
    "eval_batch_size": 100,
    "seed": 5,
}


@pytest.fixture(scope="module")
def config(digits):
    return Config(data_dir=digits, strategy="one_device", **OPTIONS)


@pytest.fixture(scope="module")
def model(config):
    """Not trained, but with answers of some certainty."""
    model = build_model(config)
    classifier = model.trainable_variables[-2]
    classifier.assign(classifier * 500)
    return model


@pytest.fixture(scope="module")
def found(config, model):
    return analyze_errors(model, config, read_info(config), step=7)


def test_against_numpy(config, model, found):
    batches = [[part.numpy() for part in b] for b in distributed_dataset(config, "validation")]
    images, labels, weights = (np.concatenate(part) for part in zip(*batches))
    images, labels = images[weights > 0], labels[weights > 0]
    logits = model(images, training=False).numpy().astype("float64")
    odds = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = odds / odds.sum(1, keepdims=True)
    own, answers = probabilities[np.arange(359), labels], logits.argmax(1)

    confusion = np.zeros((10, 10), int)
    for label, answer in zip(labels, answers):
        confusion[label, answer] += 1
    np.testing.assert_array_equal(found.confusion, entries(confusion))
    assert confusion.sum() == 359

    wrong = np.flatnonzero(answers != labels)
    worst = wrong[np.argsort(own[wrong])][:24]
    assert len(found.images) == 24
    np.testing.assert_array_equal(found.images, images[worst])
    np.testing.assert_array_equal(found.labels, labels[worst])
    np.testing.assert_array_equal(found.answers, answers[worst])
    np.testing.assert_allclose(found.label_probabilities, own[worst], rtol=1e-4)
    np.testing.assert_allclose(found.answer_probabilities, probabilities.max(1)[worst], rtol=1e-4)
    np.testing.assert_allclose(found.losses, -np.log(own[worst]), rtol=1e-4)
    assert found.step == 7


@pytest.mark.long
def test_predictions_equal_those_of_evaluation(config, model, found):
    top1 = model.evaluate(distributed_dataset(config, "validation"), verbose=0, return_dict=True)[
        "top1"
    ]
    true, answers, images = found.confusion.T
    assert images[true == answers].sum() == round(359 * float(top1))


@pytest.mark.long
def test_averaged_weights_are_used_and_the_model_is_unchanged(config, digits):
    config = config.replace(ema_decay=0.5)
    model = build_model(config)
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    before = [value.copy() for value in model.get_weights()]
    found = analyze_errors(model, config, read_info(config), step=0)
    # With its own weights it would give one answer to all.
    assert len(set(found.confusion[:, 1])) > 1
    for value, expected in zip(model.get_weights(), before):
        np.testing.assert_array_equal(value, expected)


# --- Single batches


def look(logits, labels, weights=None):
    """Returns answers and facts of images whose pixels are their numbers."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None] * np.ones((2, 2, 3), "u1")
    weights = np.ones(len(labels), "f4") if weights is None else np.array(weights, "f4")
    logits = tf.constant(logits, tf.float32)
    labels = tf.constant(labels, tf.int32)
    model = types.SimpleNamespace(logits=lambda images, weights: logits, image_loss="cross_entropy")
    parts = error_analysis._predict(model, tf.constant(images), labels, tf.constant(weights))
    _, answers, _, images, facts = (part.numpy() for part in parts)
    return answers.tolist(), images[:, 0, 0, 0].tolist(), facts


def test_padding_unreadable_and_right_images_are_no_mistakes():
    logits = [[0, 3], [0, 5], [9, 0], [0, 8], [0, 1]]
    answers, places, facts = look(logits, [0, -1, 0, 0, 0], [1, 0, 1, 0, 1])
    assert answers[0] == answers[4] == 1
    assert places[:2] == [0, 4]
    assert np.isfinite(facts[:2, -1]).all()
    assert (facts[2:, -1] == -np.inf).all()


def test_nan_losses_are_the_worst():
    _, places, facts = look([[0, 4], [np.nan, np.nan], [0, 9]], [0, 1, 0])
    assert places == [1, 2, 0]
    assert facts[0, -1] == np.inf


def test_few_mistakes_of_many_batches():
    worst = error_analysis._WorstMistakes(size=2)
    for loss in (1.0, -np.inf, 3.0, 2.0):
        image = np.full((1, 2, 2, 3), max(loss, 0), np.uint8)
        worst.add(image, np.array([[0, 1, 0, 0, loss]], np.float32))
    images, facts = worst.of_all_workers(tf.distribute.get_strategy())
    assert facts[:, -1].tolist() == [3, 2, 1]
    assert images[:, 0, 0, 0].tolist() == [3, 2, 1]


def results_of(labels, weights):
    answers = np.zeros(len(labels), np.int32)
    nothing = np.zeros((0, 16, 16, 3), np.uint8), np.zeros((0, 5), np.float32)
    yield np.array(labels), answers, np.array(weights, np.float32), *nothing


def test_each_image_is_counted_once(config, model, monkeypatch):
    labels, weights = [3] * 358 + [0, -1], [1] * 358 + [0, 0]  # One unreadable, one padding.
    monkeypatch.setattr(error_analysis, "_results", lambda *_: results_of(labels, weights))
    found = analyze_errors(model, config, read_info(config), step=0)
    assert found.confusion.tolist() == [[3, 0, 358]]
    assert len(found.images) == 0
    monkeypatch.setattr(error_analysis, "_results", lambda *_: results_of(labels[1:], weights[1:]))
    with pytest.raises(RuntimeError, match="saw 358 images, but there are 359"):
        analyze_errors(model, config, read_info(config), step=0)


# --- Several replicas


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"strategy": "mirrored", "logical_cpus": 2}, 0),
        ({"strategy": "multi_worker"}, 2),
    ],
    ids=["replicas", "workers"],
)
def test_replicas_give_the_same_analysis(digits, found, tmp_path, run_python, changes, workers):
    job = {"config": {**OPTIONS, "data_dir": digits, **changes}, "out": str(tmp_path)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_python([JOB, tmp_path / "job.json"], workers=workers)
    results = [dict(np.load(path)) for path in sorted(tmp_path.glob("*.npz"))]
    assert len(results) == max(workers, 1)
    for result in results:
        assert result["step"] == 7
        for name in ("confusion", "images", "labels", "answers"):
            np.testing.assert_array_equal(result[name], getattr(found, name), err_msg=name)
        for name in ("losses", "label_probabilities", "answer_probabilities"):
            np.testing.assert_allclose(result[name], getattr(found, name), rtol=1e-3)
