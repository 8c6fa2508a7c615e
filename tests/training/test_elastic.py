"""A run's logical replicas train the same on whatever devices carry them."""

import functools
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from elastic_job import CASES

from imagenet_fast import Config, train
from imagenet_fast.base.errors import UserError
from imagenet_fast.training.segments import read_segments

JOB = pathlib.Path(__file__).with_name("elastic_job.py")
MOVING_JOB = JOB.with_name("moving_job.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_python_session):
    """Weights after some steps, by case and number of devices."""
    folder = tmp_path_factory.mktemp("elastic")

    @functools.cache
    def arrays(devices):
        run_python_session([JOB, folder / f"{devices}.npz", devices])
        return dict(np.load(folder / f"{devices}.npz"))

    def get(case, devices):
        return [own for name, own in arrays(devices).items() if name.startswith(f"{case} ")]

    return get


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_replicas_train_the_same_on_fewer_devices(results, case, devices):
    expected, found = results(case, 4), results(case, devices)
    assert len(found) == len(expected) > 5
    for one, other in zip(found, expected):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
        else:  # counters of random draws
            np.testing.assert_array_equal(one, other)


def test_cases_differ(results):
    """Each option has an effect, so that the comparisons say something."""
    first = {case: results(case, 4)[0] for case in CASES}
    for one in CASES:
        for other in CASES:
            assert one == other or np.abs(first[one] - first[other]).max() > 1e-4


MOVING = {
    "image_size": 16,
    "train_crop": "pad",
    "batch_size": 32,
    "replicas": [4],
    "mixup_alpha": 0.2,
    "learning_rate": 0.05,
    "schedule": "constant",
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "checkpoint_every": "2 steps",
    "examine": False,
    "tensorboard": False,
}


def test_a_run_moves(digits, tmp_path, run_python_session):
    """From one device to two workers and back, to the end of the run that stayed."""

    def go(name, steps, workers=0, **options):
        kind = "multi_worker" if workers else "one_device"
        config = {**MOVING, "data_dir": digits, "strategy": kind, "duration": f"{steps} steps"}
        config["model_dir"] = str(tmp_path / name)
        (tmp_path / "job.json").write_text(json.dumps({**config, **options}))
        return run_python_session([MOVING_JOB, tmp_path / "job.json"], workers=workers)

    go("stays", 6)
    go("moves", 2)
    moved = go("moves", 4, workers=2)
    go("moves", 6)
    assert "4 replicas, 2 on each of 2 workers" in moved.stderr
    stays, moves = (weights_of(tmp_path / name) for name in ("stays", "moves"))
    assert stays.keys() == moves.keys() and len(stays) > 8
    for name, value in stays.items():
        np.testing.assert_allclose(moves[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert [one["step"] for one in read_segments(str(tmp_path / "moves"))] == [0, 2, 4]


def weights_of(model_dir):
    """All numbers of a run's last checkpoint by name."""
    path = tf.train.latest_checkpoint(str(model_dir / "checkpoints"))
    reader = tf.train.load_checkpoint(path)
    names = [name for name, kind in reader.get_variable_to_dtype_map().items() if kind.is_numeric]
    return {name: reader.get_tensor(name) for name in names}


def plain(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(8, 3, strides=2, activation="gelu")(images)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


def with_batch_norm(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, strides=2)(images))
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


def with_dropout(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = keras.layers.Dropout(0.1)(keras.layers.Flatten()(images))
    return keras.Model(images, keras.layers.Dense(num_classes)(x))


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))  # without a seed

    def compute_output_shape(self, shape):
        return shape


def with_noise(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = Noise()(keras.layers.Flatten()(images))
    return keras.Model(images, keras.layers.Dense(num_classes)(x))


def test_smaller_micro_batches(digits, tmp_path):
    """As on a device with less memory."""
    config = Config(
        **{**MOVING, "mixup_alpha": 0.0, "data_dir": digits, "replicas": (2,), "batch_size": 32}
    )

    def go(name, steps, model=plain, **options):
        own = config.replace(model_dir=str(tmp_path / name), duration=f"{steps} steps", **options)
        train(own, model=model)
        return weights_of(tmp_path / name)

    expected = go("stays", 6)
    go("smaller", 2)
    go("smaller", 4, accumulation_steps=4)
    found = go("smaller", 6, accumulation_steps=16)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    for name, model, options in (
        ("mixed", plain, {"mixup_alpha": 0.2}),
        ("normalized", with_batch_norm, {}),
        ("random", with_dropout, {}),
        ("unseeded", with_noise, {}),
    ):
        # Its weights are not looked at before.
        shutil.copytree(tmp_path / "stays", tmp_path / name)
        path = tmp_path / name / "config.json"
        there = json.loads(path.read_text())
        named = there["model"].replace("plain", model.__name__)
        path.write_text(json.dumps({**there, **options, "model": named}))
        with pytest.raises(UserError, match=r"accumulation_steps is 1 there, 2 here.*Only a netw"):
            go(name, 8, model, accumulation_steps=2, **options)
