"""Weights of models, in memory and in checkpoints, and their comparison."""

import pathlib

import numpy as np
import tensorflow as tf


def weights_of(model):
    return [weight.numpy() for weight in model.weights]


def weights_in(model_dir, folder="checkpoints"):
    """All variables of the latest checkpoint, by name."""
    reader = tf.train.load_checkpoint(str(pathlib.Path(model_dir, folder)))
    found = {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.endswith("VARIABLE_VALUE") and not name.startswith("save_counter")
    }
    assert any(name.startswith("weights/") for name in found), "not those of this version"
    return found


def assert_close(found, expected, tolerance=1e-6):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
