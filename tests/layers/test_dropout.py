import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.layers import Dropout

ONES = np.ones((64, 100), np.float32)


def make(seed=1, rate=0.3):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((100,)), Dropout(rate)])


def test_drops_the_fraction_and_keeps_the_mean():
    outputs = make()(ONES, training=True).numpy()
    assert abs((outputs == 0).mean() - 0.3) < 0.03
    np.testing.assert_allclose(outputs[outputs != 0], 1 / 0.7, rtol=1e-6)


def test_does_nothing_outside_training():
    np.testing.assert_array_equal(make()(ONES, training=False), ONES)


def test_noise_differs_between_calls_and_seeds():
    model = make(1)
    first, second = model(ONES, training=True), model(ONES, training=True)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, make(2)(ONES, training=True))
    np.testing.assert_array_equal(first, make(1)(ONES, training=True))


def test_layers_of_one_model_drop_differently():
    keras.utils.set_random_seed(1)
    a, b = Dropout(0.5), Dropout(0.5)
    assert not np.array_equal(a(ONES, training=True), b(ONES, training=True))


def test_a_checkpoint_restores_the_noise(tmp_path):
    model = make()
    model(ONES, training=True)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    expected = [model(ONES, training=True).numpy() for _ in range(2)]
    other = make(seed=5)
    tf.train.Checkpoint(model=other).restore(path).assert_consumed()
    for noise in expected:
        np.testing.assert_array_equal(other(ONES, training=True), noise)


def test_half_precision_stays_half_precision():
    assert Dropout(0.5, dtype="mixed_float16")(ONES, training=True).dtype == tf.float16


def test_serialization():
    layer = Dropout.from_config(Dropout(0.25, name="d").get_config())
    assert (layer.rate, layer.name) == (0.25, "d")


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rate_out_of_range(rate):
    with pytest.raises(UserError, match=f"rate is {rate}, but must be at least 0 and below 1"):
        Dropout(rate)
