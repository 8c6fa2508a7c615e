"""Optimizers of TensorFlow Addons, in a process of their own: ``tools/test.sh addons``.

Importing Addons registers its classes with Keras.
"""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL
from small_network import small_network

from imagenet_fast import Config, UserError, build_model, make_dataset, train
from imagenet_fast.optimizers.by_name import make_optimizer
from imagenet_fast.optimizers.schedules import StepDecay

pytestmark = [
    pytest.mark.addons,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow_addons") is None, reason="needs TensorFlow Addons"
    ),
]

JOB = pathlib.Path(__file__).with_name("addons_job.py")
RUN = SMALL.replace(learning_rate=0.01, rate_scaling="none", warmup="0 epochs")


def make(name, **changes):
    options = {"momentum": 0.8, "weight_decay": 0.0, "undecayed": [], "clip_norm": None}
    return make_optimizer(name, StepDecay(0.25, [], 0.1), **{**options, **changes})


@pytest.mark.parametrize(
    "name",
    [
        "tfa:LAMB",
        "tfa:NovoGrad",
        "tfa:SGDW",
        "tfa:Lookahead(tfa:LAMB)",
        "tfa:MovingAverage(tfa:AdamW)",
        "tfa:MovingAverage(adam)",
    ],
)
def test_addons_train(name):
    model = build_model(RUN.replace(optimizer=name, weight_decay_on="all"), model=small_network)
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(make_dataset(RUN, "train"), epochs=1, steps_per_epoch=2, verbose=0)
    moved = [np.abs(v.numpy() - b).max() for v, b in zip(model.trainable_variables, before)]
    assert max(moved) > 0
    assert np.isfinite(moved).all()


def test_five_epochs_with_lamb(digits):
    config = Config(
        data_dir=digits,
        model="resnet8",
        image_size=16,
        train_crop="none",
        eval_crop_fraction=1.0,
        batch_size=64,
        strategy="one_device",
        optimizer="tfa:LAMB",
        learning_rate=0.05,
        rate_scaling="none",
        schedule="cosine",
        warmup="0 epochs",
        duration="5 epochs",
    )
    model = build_model(config)
    validation = make_dataset(config, "validation")
    history = model.fit(make_dataset(config, "train"), validation_data=validation, verbose=0)
    assert len(history.history["loss"]) == 5
    assert history.history["val_examples"][-1] == 359
    assert history.history["val_top1"][-1] > 0.8


@pytest.mark.parametrize("name", ["tfa:LAMB", "tfa:Lookahead(tfa:LAMB)"])
def test_a_run_logs_the_learning_rate_of_each_step(tmp_path, name):
    config = RUN.replace(
        optimizer=name,
        model_dir=str(tmp_path),
        schedule="polynomial",
        decay_power=1.0,
        duration="4 steps",
        log_every="1 step",
        tensorboard=False,
        examine=False,
    )
    train(config, model=small_network)
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rates = [row["learning_rate"] for row in rows if row["kind"] == "train"]
    np.testing.assert_allclose(rates, [0.01, 0.0075, 0.005, 0.0025], rtol=1e-5)


def test_addons_decay_by_role():
    variables = [tf.Variable([2.0], name="a/kernel"), tf.Variable([2.0], name="a/bias")]
    optimizer = make("tfa:LAMB", weight_decay=0.5, undecayed=variables[1:])
    optimizer.apply_gradients([(tf.constant([0.0]), v) for v in variables])
    assert variables[0].numpy()[0] < 2.0
    assert variables[1].numpy()[0] == 2.0


def test_addons_decay_by_role_on_all_replicas(run_python):
    """Of whose copies each has a name of its own."""
    kernel, bias = json.loads(run_python([JOB, "tfa:LAMB"]).stdout.splitlines()[-1])
    assert kernel[0] == kernel[1] < 2.0
    assert bias == [2.0, 2.0]


@pytest.mark.parametrize("name", ["tfa:AdamW", "tfa:SGDW", "tfa:NovoGrad", "tfa:RectifiedAdam"])
def test_addons_that_cannot_exclude_from_decay(name):
    variable = tf.Variable([2.0], name="a/bias")
    for own in (name, f"tfa:Lookahead({name})"):
        with pytest.raises(UserError, match=rf"optimizer={name} cannot .* weight_decay_on=all, Ke"):
            make(own, weight_decay=0.5, undecayed=[variable])
    assert make(name, weight_decay=0.5)
    assert make(name, undecayed=[variable])


def test_addons_without_decay_need_not_exclude():
    assert make("tfa:Yogi", weight_decay=0.5, undecayed=[tf.Variable([2.0])])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfa:LAMP", "did you mean 'LAMB'"),
        ("tfa:Lookahead", r"write tfa:Lookahead\(adam\)"),
        ("tfa:LAMB(adam)", "wraps no other"),
    ],
)
def test_addons_misused(name, message):
    with pytest.raises(UserError, match=message):
        make(name)
