"""What all optimizers with momentum share, each by the same steps."""

import importlib.util
import json
import os
import pathlib

import keras
import momentum_job as job
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.optimizers import LARS, SGD, Muon

EACH = pytest.mark.parametrize("name", job.OPTIMIZERS)
VARIANTS = ("sgd_of_page", "lars_rate_outside")


def train(optimizer, jit_compile=False):
    """Returns all weights after the steps of the job, in a row; float32."""
    weights, gradients = job.problem()
    variables = [tf.Variable(weight) for weight in weights]
    optimizer.build(variables)

    @tf.function(jit_compile=jit_compile)
    def step(grads):
        optimizer.apply_gradients(zip(grads, variables))

    for grads in gradients:
        step([tf.constant(g) for g in grads])
    return np.concatenate([variable.numpy().ravel() for variable in variables])


@EACH
def test_in_one_program_of_xla(name):
    expected = train(job.OPTIMIZERS[name]())
    found = train(job.OPTIMIZERS[name](), jit_compile=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(expected).max() < 10  # so that the tolerance means something


def test_two_devices(run_python, tmp_path):
    """As one device."""
    out = tmp_path / "weights.npz"
    run_python([pathlib.Path(job.__file__), out])
    with np.load(out) as found:
        for name, make in job.OPTIMIZERS.items():
            np.testing.assert_allclose(found[name], train(make()), rtol=1e-6, atol=1e-6)


OF_ANOTHER_BACKEND = """
import sys

import keras
import momentum_job as job
import numpy as np

results = {}
for name, make in job.OPTIMIZERS.items():
    weights, gradients = job.problem()
    variables = [keras.Variable(weight) for weight in weights]
    optimizer = make()
    for grads in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in grads], variables)
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    results[name] = np.concatenate([value.ravel() for value in values])
np.savez(sys.argv[1], **results)
"""


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.compile), "torch"])
def test_other_backends_of_keras(backend, run_python, tmp_path):
    """As TensorFlow's kernels."""
    if KERAS_2 or not importlib.util.find_spec(backend):
        pytest.skip(f"Keras 3 or {backend} is not installed")
    folder = pathlib.Path(job.__file__).parent
    path = f"{folder}:{folder.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    run_python(
        ["-c", OF_ANOTHER_BACKEND, tmp_path / "weights.npz"], environment=environment, fresh=True
    )
    with np.load(tmp_path / "weights.npz") as found:
        for name, make in job.OPTIMIZERS.items():
            np.testing.assert_allclose(found[name], train(make()), rtol=1e-5, atol=1e-6)


@EACH
def test_serialization(name):
    optimizer = job.OPTIMIZERS[name]()
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    np.testing.assert_array_equal(train(again), train(optimizer))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in VARIANTS else ())
        for name in job.OPTIMIZERS
    ],
)
def test_factors_apply(name):
    """Each of them moves the weights elsewhere."""
    config = job.OPTIMIZERS[name]().get_config()
    config["learning_rate"] = job.RATES

    def with_factors(**factors):
        return train(type(job.OPTIMIZERS[name]()).from_config({**config, **factors}))

    found = with_factors()
    for option in ("rate_factors", "weight_decay_mask"):
        assert np.abs(with_factors(**{option: None}) - found).max() > 1e-3
        np.testing.assert_array_equal(
            with_factors(**{option: [True] * 4}), with_factors(**{option: None})
        )


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (SGD, "weight_decay_mask"),
        (SGD, "rate_factors"),
        (SGD, "zero_rate_at"),
        (LARS, "trust_mask"),
        (Muon, "filter_mask"),
    ],
)
def test_too_few_entries(make, option):
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    optimizer = make(**{option: [False]})
    grads = [tf.constant([1.0])] * 2
    for _ in range(2):  # the failure leaves nothing half-built
        with pytest.raises(UserError, match=f"{option} has 1 entries, but there are 2 trainable"):
            optimizer.apply_gradients(zip(grads, variables))
    assert variables[0].numpy() == [1.0]


@pytest.mark.parametrize("kind", [SGD, LARS, Muon])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0, but must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum is -0.1, but must be"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001, but must not be negative"),
    ],
)
def test_options_out_of_range(kind, options, message):
    with pytest.raises(UserError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"epsilon": -1.0}, "epsilon is -1.0, but must not be negative"),
        (Muon, {"filter_momentum": 1.0}, "filter_momentum is 1.0, but must be at least 0 and"),
        (Muon, {"newton_schulz_steps": 0}, "newton_schulz_steps is 0, but must be positive"),
    ],
)
def test_own_options_out_of_range(kind, options, message):
    with pytest.raises(UserError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", [SGD, LARS, Muon])
def test_no_weight_decay_as_keras_has_it(kind):
    assert kind(weight_decay=None).get_config() == kind(weight_decay=0.0).get_config()


@pytest.mark.parametrize("kind", [SGD, LARS, Muon])
def test_exclude_from_weight_decay_is_refused(kind):
    """It would be for Keras' own decay, and do nothing here."""
    with pytest.raises(UserError, match="excludes variables from weight decay by weight_"):
        kind(weight_decay=0.1).exclude_from_weight_decay(var_names=["bias"])
