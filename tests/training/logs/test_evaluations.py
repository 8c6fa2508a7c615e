"""Early stopping, against Keras' own."""

import json
import types

import keras
import pytest

from imagenet_fast import Config
from imagenet_fast.training.logs.evaluations import Evaluations


def epochs_of_keras(top1s, patience):
    """Returns the number of epochs after which Keras' EarlyStopping ends training."""
    model = types.SimpleNamespace(stop_training=False)
    callback = keras.callbacks.EarlyStopping("val_top1", mode="max", patience=patience)
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, top1 in enumerate(top1s):
        callback.on_epoch_end(epoch, {"val_top1": top1})
        if model.stop_training:
            return epoch + 1
    return None


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(
    "top1s",
    [
        (0.1, 0.2, 0.3, 0.4, 0.5),
        (0.5, 0.4, 0.3, 0.2, 0.1),
        (0.5, 0.5, 0.5, 0.6, 0.5, 0.5),
        (0.1, 0.3, 0.2, 0.25, 0.31, 0.3, 0.3),
        (0.0, 0.0),
    ],
)
def test_early_stopping_is_that_of_keras(top1s, patience):
    config, evaluations, stopped = Config(early_stopping=patience), Evaluations(), None
    for number, top1 in enumerate(top1s, start=1):
        evaluations.add({"step": 10 * number, "top1": top1})
        # As if each epoch ran in a process of its own.
        evaluations = Evaluations.from_state(json.loads(json.dumps(evaluations.state())))
        if evaluations.reason_to_stop(config):
            stopped = number
            break
    assert stopped == epochs_of_keras(top1s, patience)


def test_reasons():
    evaluations = Evaluations()
    assert evaluations.reason_to_stop(Config(early_stopping=1, stop_at_accuracy=0.5)) == ""
    evaluations.add({"step": 10, "top1": 0.75})
    evaluations.add({"step": 20, "top1": 0.6})
    assert evaluations.reason_to_stop(Config()) == ""
    assert evaluations.reason_to_stop(Config(early_stopping=2)) == ""
    reason = "by early_stopping=1: the best top-1, 75.00%, is that of step 10"
    assert evaluations.reason_to_stop(Config(early_stopping=1)) == reason
    assert "reached stop_at_accuracy=0.6" in evaluations.reason_to_stop(
        Config(stop_at_accuracy=0.6)
    )


def test_checkpoints_of_earlier_versions():
    last = {"step": 10, "top1": 0.5}
    assert Evaluations.from_state({"validation": last}) == Evaluations(last, last, 0)
    assert Evaluations.from_state({"validation": {}}) == Evaluations()


@pytest.mark.parametrize("best", [{}, {"top1": 0.5}, {"step": 3}])
def test_a_best_evaluation_without_an_accuracy_is_none(best):
    restored = Evaluations.from_state({"validation": {}, "best": best})
    assert restored.best == {}
    restored.add({"step": 4, "top1": 0.25})
    assert restored.best["step"] == 4


def test_a_state_without_a_best_evaluation_does_not_stop():
    state = {"validation": {}, "best": {}, "evaluations_since_best": 5}
    evaluations = Evaluations.from_state(state)
    assert evaluations.reason_to_stop(Config(early_stopping=3)) == ""


def test_another_metric_is_compared():
    """Mean average precision if there is one; a loss that falls is better."""
    rows = [
        {"kind": "validation", "step": step, "map": value, "loss": loss, "f1_micro": 0.1}
        for step, value, loss in ((1, 0.4, 0.5), (2, 0.6, 0.7), (3, 0.5, 0.3))
    ]
    assert Evaluations.of_rows(rows).best["step"] == 2
    assert Evaluations.of_rows(rows, "loss").best["step"] == 3
    assert Evaluations.of_rows(rows, "f1_micro").best["step"] == 1
    assert Evaluations.of_rows(rows, "top1").best == {}
    evaluations = Evaluations.from_state(Evaluations.of_rows(rows).state())
    assert evaluations.since_best == 1
    reason = evaluations.reason_to_stop(Config(early_stopping=1))
    assert reason == "by early_stopping=1: the best mAP, 60.00%, is that of step 2"
    assert not evaluations.reason_to_stop(Config(stop_at_accuracy=0.55))
    assert evaluations.reason_to_stop(Config(stop_at_accuracy=0.45))
    assert evaluations.reason_to_stop(Config(stop_at_accuracy=0.35, best_metric="loss"))
    assert not evaluations.reason_to_stop(Config(stop_at_accuracy=0.25, best_metric="loss"))
