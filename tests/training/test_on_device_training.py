"""Training on images that the devices hold: the same on one device, replicas and workers."""

import json
import pathlib

import numpy as np
import pytest

# Quick tests: tests/data/test_on_device.py has the batches of replicas.
pytestmark = [pytest.mark.slow, pytest.mark.long]

JOB = pathlib.Path(__file__).with_name("on_device_job.py")
OPTIONS = {
    "model": "resnet8",
    "image_size": 32,
    "data_on_device": True,
    "train_crop": "pad",
    "crop_border": "reflect",
    "cutout": 5,
    "augment_in_groups": True,
    "batch_size": 120,
    "eval_batch_size": 100,
    "learning_rate": 0.05,
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "seed": 3,
}
# Name -> (changed options, worker processes).
JOBS = {
    "one_device": ({"strategy": "one_device"}, 0),
    "replicas": ({"strategy": "mirrored", "logical_cpus": 2}, 0),
    "workers": ({"strategy": "multi_worker"}, 2),
}


@pytest.fixture(scope="module")
def results(digits, tmp_path_factory, run_python_session):
    """The outcome of each job, run when it is first asked for."""
    found = {}

    def get(name):
        if name not in found:
            changes, workers = JOBS[name]
            out = tmp_path_factory.mktemp(name) / "out.npz"
            options = json.dumps({**OPTIONS, "data_dir": digits, **changes})
            run_python_session([JOB, options, out], workers=workers)
            found[name] = dict(np.load(out))
        return found[name]

    return get


@pytest.mark.parametrize("name", ["replicas", "workers"])
def test_same_weights(results, name):
    one, other = results("one_device"), results(name)
    names = [key for key in one if key.startswith("weight")]
    assert names
    for key in names:
        np.testing.assert_allclose(one[key], other[key], rtol=0, atol=1e-5)
        assert np.abs(one[key] - one[key.replace("weight", "initial")]).max() > 0.001


@pytest.mark.parametrize("name", JOBS)
def test_each_image_is_evaluated_once(results, name):
    one, other = results("one_device"), results(name)
    assert (other["told_examples"], other["told_skipped"]) == (359, 0)
    assert other["told_top1"] == one["told_top1"]
    np.testing.assert_allclose(other["told_loss"], one["told_loss"], rtol=1e-5)
