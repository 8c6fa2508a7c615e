"""One device, replicas, micro-batches, stages and XLA learn the same from a teacher."""

import json
import pathlib

import numpy as np
import pytest

from imagenet_fast import Config, train
from imagenet_fast.base.keras_2 import KERAS_2

pytestmark = [pytest.mark.slow, pytest.mark.skipif(KERAS_2, reason="needs Keras 3")]

JOB = pathlib.Path(__file__).with_name("distillation_job.py")
OPTIONS = {
    "image_size": 16,
    "train_crop": "pad",
    "batch_size": 32,
    "learning_rate": 0.1,
    "rate_scaling": "none",
    "warmup": "0 steps",
    "decay_at": "15 steps",
    "distillation_temperature": 2.0,
    "seed": 3,
}
ONE = {"strategy": "one_device"}
OTHERS = {
    "replicas and micro-batches": {
        "strategy": "mirrored",
        "logical_cpus": 2,
        "accumulation_steps": 2,
    },
    "rematerialized with XLA": {**ONE, "xla": True, "rematerialize": "always"},
    "stages": {"logical_cpus": 2, "pipeline_stages": 2, "accumulation_steps": 2},
}


@pytest.fixture(scope="module")
def teacher(digits, tmp_path_factory):
    """A run of a few steps, on images of another size."""
    directory = str(tmp_path_factory.mktemp("teacher"))
    config = Config(
        **{**OPTIONS, "image_size": 12, "distillation_temperature": 1.0},
        **ONE,
        model="resnet8",
        duration="3 steps",
        data_dir=digits,
        model_dir=directory,
        examine=False,
        tensorboard=False,
    ).replace(decay_at="2 steps")
    train(config)
    return directory


@pytest.fixture(scope="module")
def run_job(digits, teacher, tmp_path_factory, run_python_session):
    def run(changes):
        options = json.dumps({**OPTIONS, "data_dir": digits, "teacher": teacher, **changes})
        path = tmp_path_factory.mktemp("job") / "out.npz"
        run_python_session([JOB, options, path])
        return dict(np.load(path))

    return run


@pytest.fixture(scope="module")
def one_device(run_job):
    return run_job(ONE)


@pytest.mark.parametrize("name", OTHERS)
def test_same_steps_as_on_one_device(run_job, one_device, name):
    found = run_job(OTHERS[name])
    assert found.keys() == one_device.keys()
    for key, value in one_device.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
