"""What a model gets wrong, against the model asked image by image."""

import functools
import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf
from confusion_entries import entries

from imagenet_fast import Config, build_model
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.evaluated import file_names_of
from imagenet_fast.data.info import read_info
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.run import Run, make_run
from imagenet_fast.training.step.calibration import reliability
from imagenet_fast.training.step.error_analysis import (
    Predictions,
    confused_pairs,
    with_file_names,
)

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
    evaluator = Evaluator(make_run(config), model, keeps_predictions=True)
    evaluator.evaluate(7)
    analysis, predictions = evaluator.results()
    names = functools.partial(file_names_of, read_info(config), "validation")
    return with_file_names(analysis, predictions, names)


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
    confidences = probabilities.max(1)
    bins = reliability(confidences, answers == labels)
    np.testing.assert_allclose(found.calibration, bins, rtol=1e-4)


def test_names_of_mistakes(config, found):
    """Against the source: its names have the numbers of the images there."""
    source = open_source("digits")

    def labels_of(files):
        return [source.read("validation", int(file.split("_")[1])).label for file in files]

    assert len(set(found.files)) == 24
    assert labels_of(found.files) == found.labels.tolist()
    pairs = confused_pairs(found.confusion)
    assert len(found.confused_files) == len(pairs) == 15
    assert (np.diff(pairs[:, 2]) <= 0).all()
    for (label, _, images), files in zip(pairs.tolist(), found.confused_files.tolist()):
        named = list(filter(None, files))
        assert len(named) == min(images, 3)
        assert set(labels_of(named)) == {label}
    # Among the worst mistakes, those of a pair are the first of the pair.
    for label, answer, file in zip(found.labels, found.answers, found.files):
        place = np.flatnonzero((pairs[:, :2] == (label, answer)).all(1))
        worst = found.files[(found.labels == label) & (found.answers == answer)][:3]
        if len(place) and file in worst:
            assert file in found.confused_files[place[0]]


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
    evaluator = Evaluator(make_run(config), model, keeps_predictions=True)
    evaluator.evaluate()
    found = evaluator.results()[0]
    # With its own weights it would give one answer to all.
    assert len(set(found.confusion[:, 1])) > 1
    for value, expected in zip(model.get_weights(), before):
        np.testing.assert_array_equal(value, expected)


# --- Single batches


def analysis_of(*batches, size=2):
    """Returns the analysis of batches of logits, labels and weights.

    Pixels are the numbers of the images, from 0.
    """
    images = sum(len(labels) for _, labels, _ in batches)
    split = types.SimpleNamespace(examples=images)
    info = types.SimpleNamespace(splits={"validation": split})
    options = Config(batch_size=images, image_size=size)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    predictions = Predictions(Run(options, info, strategy))

    @tf.function(autograph=False)
    def add(*batch):
        strategy.run(predictions.add, batch)

    first = 0
    for logits, labels, weights in batches:
        pixels = np.arange(first, first + len(labels), dtype=np.uint8)[:, None, None, None]
        first += len(labels)
        add(
            tf.constant(pixels * np.ones((size, size, 3), np.uint8)),
            tf.constant(labels, tf.int32),
            tf.constant(weights, tf.float32),
            tf.constant(logits, tf.float32),
        )
    return predictions.results(step=3)[0]


def test_padding_unreadable_and_right_images_are_no_mistakes():
    logits = [[0, 3], [0, 5], [9, 0], [0, 8], [0, 1]]
    found = analysis_of((logits, [0, -1, 0, 0, 0], [1, 0, 1, 0, 1]))
    assert found.confusion.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert found.images[:, 0, 0, 0].tolist() == [0, 4]
    assert found.labels.tolist() == [0, 0]
    assert found.answers.tolist() == [1, 1]


def test_nan_losses_are_the_worst():
    found = analysis_of(([[0, 4], [np.nan, np.nan], [0, 9]], [0, 1, 0], [1, 1, 1]))
    assert found.images[:, 0, 0, 0].tolist() == [1, 2, 0]
    assert found.losses[0] == np.inf
    assert found.label_probabilities[0] == 0


def test_the_worst_of_many_batches():
    """Of 30 mistakes in batches of 1 to 7 images the 24 with the highest loss, in their order."""
    margins = np.random.default_rng(1).permutation(np.arange(1, 31))
    batches = np.split(margins, np.cumsum([7, 1, 5, 5, 6]))
    found = analysis_of(
        *(
            (np.stack([np.zeros(len(part)), part], 1), [0] * len(part), [1] * len(part))
            for part in batches
        )
    )
    assert found.confusion.tolist() == [[0, 1, 30]]
    assert found.images[:, 0, 0, 0].tolist() == np.argsort(-margins)[:24].tolist()


def test_no_mistake():
    found = analysis_of(([[4, 0]], [0], [1]))
    assert found.confusion.tolist() == [[0, 0, 1]]
    assert len(found.images) == len(found.losses) == 0


def test_an_evaluation_begins_without_predictions_of_the_last_one(config, model, found):
    evaluator = Evaluator(make_run(config), model, keeps_predictions=True)
    for step in (6, 7):
        evaluator.evaluate(step)
        again = evaluator.results()[0]
        assert again.step == step
        np.testing.assert_array_equal(again.confusion, found.confusion)
        np.testing.assert_array_equal(again.images, found.images)


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
        for name in ("confusion", "images", "labels", "answers", "files", "confused_files"):
            np.testing.assert_array_equal(result[name], getattr(found, name), err_msg=name)
        np.testing.assert_allclose(result["calibration"], found.calibration, rtol=1e-3)
        for name in ("losses", "label_probabilities", "answer_probabilities"):
            np.testing.assert_allclose(result[name], getattr(found, name), rtol=1e-3)
