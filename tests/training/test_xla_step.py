"""With XLA, a whole step of one device is one program."""

import collections
import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from model_weights import weights_of

from imagenet_fast import Config, build_model, make_dataset
from imagenet_fast.optimizers import muon
from imagenet_fast.optimizers.muon import orthogonalize

pytestmark = pytest.mark.slow

FLAGS = pathlib.Path(__file__).parents[2] / "imagenet_fast" / "flags"
PROGRAM = "StatefulPartitionedCall"
# What is left around the program: the number of the step comes in, results go out.
AROUND = {PROGRAM, "Placeholder", "IteratorGetNext", "Identity", "NoOp"}


def recipe(name, digits, **changes):
    return Config.from_flagfile(
        FLAGS / f"{name}.flags",
        data_dir=digits,
        width=4,
        image_size=16,
        batch_size=64,
        batch_norm_batch_size=16 if name.startswith("myrtle") else 0,
        precision="float32",
        **changes,
    )


# In the default run, test_classifier.py compares a step with and without XLA.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [
        ("airbench_cifar10", "float32", 2e-5),
        ("airbench_cifar10", "mixed_bfloat16", None),
        ("myrtle_cifar10", "float32", 2e-5),
        ("myrtle_cifar10", "mixed_float16", None),
    ],
)
def test_xla_compiles_the_whole_step(digits, name, precision, tolerance, monkeypatch):
    if tolerance:
        # In bfloat16, Muon's products differ by up to 5e-3 from one machine to another.
        in_float32 = functools.partial(orthogonalize, dtype="float32")
        monkeypatch.setattr(
            muon,
            "orthogonalize",
            lambda matrix, steps, _, coefficients: in_float32(
                matrix, steps, coefficients=coefficients
            ),
        )
    config = recipe(name, digits).replace(precision=precision, lookahead_every=2, clip_norm=10.0)
    model, function, batches = prepared(config)
    assert np.isfinite(function(batches)["loss"])
    operations = function.get_concrete_function(batches).graph.get_operations()
    by_type = collections.Counter(operation.type for operation in operations)
    assert set(by_type) <= AROUND
    assert by_type[PROGRAM] == 1
    (program,) = (operation for operation in operations if operation.type == PROGRAM)
    assert program.get_attr("_XlaMustCompile")

    if tolerance:
        plain, function, batches = prepared(config.replace(xla=False))
        function(batches)
        for one, other in zip(weights_of(model), weights_of(plain)):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=tolerance)


def prepared(config):
    """A model, its step in a graph, and its data."""
    model = build_model(config)
    run = model.distribute_strategy.run
    step = tf.function(lambda batches: run(model.train_step, (next(batches),)), autograph=False)
    return model, step, iter(make_dataset(config, "train"))
