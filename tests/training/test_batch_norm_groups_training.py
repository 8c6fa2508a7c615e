"""--batch_norm_batch_size: replicas that take batch statistics together are as one device."""

import functools
import json
import pathlib

import batch_norm_groups_job as job
import keras
import numpy as np
import pytest

from imagenet_fast import Config, UserError, build_model
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.layers import GroupedBatchNormalization
from imagenet_fast.training.build.model import build_classifier

JOB = pathlib.Path(__file__).with_name("batch_norm_groups_job.py")
OPTIONS = {
    "model": "resnet8",
    "image_size": 32,
    "train_crop": "pad",
    "batch_size": 32,
    # A young network with batch norm multiplies rounding errors by ten a step at higher rates.
    "learning_rate": 0.005,
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "decay_at": "15 steps",
    "zero_gamma": False,
    "seed": 3,
}


@pytest.fixture(scope="module")
def one_device(digits):
    """What one device finds with so many micro-batches, when it is first asked for."""
    config = Config(**OPTIONS, data_dir=digits, strategy="one_device")
    return functools.cache(lambda steps: job.train(config.replace(accumulation_steps=steps)))


# In the default run, tests/layers/test_grouped_batch_normalization.py has groups of devices.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"strategy": "mirrored", "logical_cpus": 2, "batch_norm_batch_size": 32}, 0),
        ({"strategy": "multi_worker", "batch_norm_batch_size": 32}, 2),
        # Each worker carries a group of two logical replicas: half of one device's batch.
        ({"strategy": "multi_worker", "batch_norm_batch_size": 16, "replicas": [4]}, 2),
    ],
    ids=["devices", "workers", "logical_replicas"],
)
def test_as_one_device(digits, one_device, tmp_path, run_python, changes, workers):
    out = tmp_path / "out.npz"
    config = {**OPTIONS, "data_dir": digits, **changes}
    evaluate = not workers
    values = {"config": config, "evaluate": evaluate, "out": str(out)}
    (tmp_path / "job.json").write_text(json.dumps(values))
    run_python([JOB, tmp_path / "job.json"], workers=workers)
    found = dict(np.load(out))
    if evaluate:
        assert found.pop("examples") == 359
    expected = one_device(2 if "replicas" in changes else 1)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        # 1.01e-5 on a CPU without AVX-512.
        np.testing.assert_allclose(found[key], values, rtol=0, atol=1.5e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.long
def test_other_batch_norm_groups_give_other_weights(one_device):
    whole, halves = one_device(1), one_device(2)
    assert max(np.abs(whole[key] - halves[key]).max() for key in whole) > 1e-4


SYNTHETIC = {"synthetic": True, "num_classes": 10, "train_crop": "none", "batch_size": 32}


@pytest.mark.parametrize(
    "model",
    [
        "resnet8",
        pytest.param("resnet18", marks=pytest.mark.long),
        pytest.param("alexnet_bn", marks=pytest.mark.long),
    ],
)
def test_one_replica_uses_keras_layer(model):
    config = Config(
        **SYNTHETIC,
        model=model,
        image_size=64,
        strategy="one_device",
        batch_norm_batch_size=4096,
    )
    norms = [
        layer
        for layer in layers_in(build_model(config))
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert norms
    assert not any(isinstance(layer, GroupedBatchNormalization) for layer in norms)


def test_pipelines_have_no_batch_norm_groups(monkeypatch):
    strategy = PipelineStrategy()
    monkeypatch.setattr(strategy.extended, "_count", 2)
    config = Config(**SYNTHETIC, model="resnet8", accumulation_steps=2, batch_norm_batch_size=16)
    message = "needs groups of 2 replicas, which pipelines do not support: use at most 8, the ima"
    with strategy.scope(), pytest.raises(UserError, match=message):
        build_classifier(config, list(map(str, range(10))))


def test_batch_norm_batch_size_must_not_be_negative():
    with pytest.raises(UserError, match="batch_norm_batch_size is -1, but must not be negative"):
        Config(batch_norm_batch_size=-1)


ON_FOUR_DEVICES = """
import pytest
from imagenet_fast import Config, UserError, build_model
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.layers import GroupedBatchNormalization

options = dict(
    synthetic=True, num_classes=10, train_crop="none", image_size=64, batch_size=32, logical_cpus=4
)

# 8 images on each of four replicas.
for model in ("resnet8", "resnet18", "alexnet_bn"):
    built = build_model(Config(**options, model=model, batch_norm_batch_size=16))
    norms = [x for x in layers_in(built) if isinstance(x, GroupedBatchNormalization)]
    assert norms and {x.group_size for x in norms} == {2}, model

def refused(message, **changes):
    with pytest.raises(UserError, match=message):
        build_model(Config(**{**options, "model": "resnet8", **changes}))

refused("groups of 3 replicas with 8 images each, .* try 16 or 32", batch_norm_batch_size=24)
refused("groups of 2 replicas, which XLA .* leave out xla", batch_norm_batch_size=16, xla=True)
refused(
    "needs groups of 4 replicas, which .* accumulation_steps=2; use 1, or a worker process",
    batch_norm_batch_size=16,
    accumulation_steps=2,
)
build_model(Config(**options, model="resnet8", batch_norm_batch_size=8, xla=True))
"""


@pytest.mark.long
@pytest.mark.slow
def test_four_devices(run_python):
    run_python(["-c", ON_FOUR_DEVICES])
