"""Keras' optimizers with arguments and layer-wise learning rates: replicas and checkpoints."""

import json
import pathlib

import numpy as np
import pytest

from imagenet_fast.base.keras_2 import KERAS_2

pytestmark = [pytest.mark.slow, pytest.mark.skipif(KERAS_2, reason="needs Keras 3")]

JOB = pathlib.Path(__file__).with_name("layer_decay_job.py")
OPTIONS = {
    "image_size": 32,
    "train_crop": "pad",
    "batch_size": 32,
    "learning_rate": 0.002,
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "decay_at": "15 steps",
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "seed": 3,
}
ON = {
    "one": {"strategy": "one_device"},
    "two": {"strategy": "mirrored", "logical_cpus": 2},
}


def test_two_replicas_take_the_steps_of_one_which_resumes_to_the_bit(digits, tmp_path, run_python):
    """The job compares the run that resumes."""
    found = {}
    for name, changes in ON.items():
        options = json.dumps({**OPTIONS, "data_dir": digits, **changes})
        run_python([JOB, options, tmp_path / name, tmp_path / f"{name}.npz"])
        found[name] = dict(np.load(tmp_path / f"{name}.npz"))
    assert found["one"].keys() == found["two"].keys()
    assert sum("slot" in key for key in found["one"]) > 4 * 8
    for key, value in found["one"].items():
        np.testing.assert_allclose(found["two"][key], value, rtol=1e-4, atol=1e-5, err_msg=key)
