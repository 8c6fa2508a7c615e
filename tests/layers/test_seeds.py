"""Random layers draw by key, call, replica and micro-batch."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.layers import Dropout
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.layers.seeds import UnseededDraws, count, draw_by_replica, seed_states

IMAGES = np.random.default_rng(0).uniform(1, 2, (16, 4, 4, 3)).astype("float32")


class StochasticDepth(keras.layers.Layer):
    """As in papers: leaves out whole images, by a generator of its own."""

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator or keras.random.SeedGenerator()

    def call(self, inputs, training=None):
        if not training:
            return inputs
        kept = keras.random.uniform((len(IMAGES), 1, 1, 1), seed=self.generator) > 0.5
        return inputs * keras.ops.cast(kept, inputs.dtype)


class Twice(keras.layers.Layer):
    """Calls one layer two times."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs, training=None):
        first, second = (self.inner(inputs, training=training) for _ in range(2))
        return tf.stack([first, second])


LAYERS = {"ours": lambda: Dropout(0.5)}
if not KERAS_2:  # whose own layers draw from tf.random
    LAYERS.update(
        dropout=lambda: keras.layers.Dropout(0.5),
        spatial=lambda: keras.layers.SpatialDropout2D(0.5),
        noise=lambda: keras.layers.GaussianNoise(1.0),
        flip=lambda: keras.layers.RandomFlip("horizontal"),
        depth=StochasticDepth,
    )
all_layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def network(make, seed=1):
    keras.utils.set_random_seed(seed)
    images = keras.Input(IMAGES.shape[1:])
    made = keras.Model(images, make()(images))
    draw_by_replica(made)
    return made


@all_layers
def test_workers_can_send_each_other_the_state(make):
    """As the first one does where it makes the variable; TensorFlow has this list for it."""
    operation = op_def_registry.get("CollectiveBcastSend")
    (kind,) = (attribute for attribute in operation.attr if attribute.name == "T")
    for state in seed_states(network(make)):
        assert tf.as_dtype(state.dtype).as_datatype_enum in kind.allowed_values.list.type


def drawn(model, part=None):
    if part is None:
        return np.asarray(model(IMAGES, training=True))
    with micro_batch(part):
        return np.asarray(model(IMAGES, training=True))


def assert_all_differ(results):
    assert len({np.asarray(result).tobytes() for result in results}) == len(results)


@all_layers
def test_each_call_draws_anew(make):
    model = network(make)
    first = [drawn(model) for _ in range(3)]
    assert_all_differ(first)
    again = network(make)
    np.testing.assert_array_equal(first, [drawn(again) for _ in range(3)])
    np.testing.assert_array_equal(model(IMAGES, training=False), IMAGES)


@all_layers
def test_micro_batches_draw_the_same_when_computed_again(make):
    model = network(make)
    parts = [drawn(model, part) for part in (0, 1)]
    np.testing.assert_array_equal(parts[::-1], [drawn(model, part) for part in (1, 0)])
    for state in seed_states(model):
        count(state)
    # In the next step others.
    assert_all_differ([*parts, *(drawn(model, part) for part in (0, 1)), drawn(model)])


@all_layers
def test_a_layer_used_twice(make):
    model = network(lambda: Twice(make()))
    parts = [drawn(model, part) for part in (0, 1)]
    np.testing.assert_array_equal(parts, [drawn(model, part) for part in (0, 1)])
    assert_all_differ([*parts[0], *parts[1], *drawn(model)])


@all_layers
def test_states_resume(make):
    model, other = network(make), network(make, seed=2)
    drawn(model)
    for state, before in zip(seed_states(other), seed_states(model)):
        assert not np.array_equal(state, before)
        state.assign(before)
    np.testing.assert_array_equal(drawn(other), drawn(model))


@pytest.mark.skipif(KERAS_2, reason="of the seeds of Keras 3")
def test_layers_of_one_seed_draw_alike_as_in_keras():
    class Both(keras.layers.Layer):
        def __init__(self, seeds):
            super().__init__()
            self.layers = [keras.layers.Dropout(0.5, seed=seed) for seed in seeds]

        def call(self, inputs, training=None):
            return tf.stack([layer(inputs, training=training) for layer in self.layers])

    one, other = drawn(network(lambda: Both([5, 5])))
    np.testing.assert_array_equal(one, other)
    assert_all_differ(drawn(network(lambda: Both([5, 6]))))


@pytest.mark.skipif(KERAS_2, reason="of the seeds of Keras 3")
def test_a_generator_that_layers_share_counts_each_call():
    generator = keras.random.SeedGenerator(3)
    model = network(lambda: keras.Sequential([StochasticDepth(generator) for _ in range(2)]))
    (state,) = seed_states(model)
    drawn(model)
    assert np.asarray(state).tolist() == [3, 2]


@pytest.mark.skipif(KERAS_2, reason="of the seeds of Keras 3")
def test_new_states_go_on():
    """As of a pipeline's blocks, each on its device."""
    model, expected = (network(LAYERS["dropout"]) for _ in range(2))
    for _ in range(2):
        drawn(model), drawn(expected)
    (before,) = seed_states(model)
    draw_by_replica(model)
    assert seed_states(model) == [before]
    draw_by_replica(model, again=True)
    assert seed_states(model)[0] is not before
    np.testing.assert_array_equal(drawn(model), drawn(expected))


TWO_REPLICAS = f"""
import json, sys
import numpy as np, tensorflow as tf
from imagenet_fast import Config, make_strategy

sys.path.append({str(pathlib.Path(__file__).parent)!r})
strategy = make_strategy(Config(logical_cpus=2, batch_size=2))
from test_seeds import IMAGES, LAYERS, network

results = {{}}
for name, make in LAYERS.items():
    with strategy.scope():
        model = network(make)
    step = tf.function(lambda: strategy.run(lambda: model(IMAGES, training=True)))
    steps = [strategy.experimental_local_results(step()) for _ in range(2)]
    results[name] = np.array(steps).tolist()
print(json.dumps(results))
"""


@pytest.mark.slow
def test_replicas_draw_differently(run_python):
    """Each anew in each step; the first as one device does."""
    results = json.loads(run_python(["-c", TWO_REPLICAS]).stdout)
    for name, make in LAYERS.items():
        steps = np.array(results[name], "float32")
        assert_all_differ([*steps[0], *steps[1]])
        model = network(make)
        np.testing.assert_allclose(steps[:, 0], [drawn(model) for _ in range(2)], rtol=1e-6)


def draws(key, step, count=2):
    unseeded = UnseededDraws(key)

    @tf.function
    def draw(step):
        with unseeded.of_step(step):
            return [keras.random.uniform((4,)) for _ in range(count)]

    return np.array(draw(tf.constant(step)))


@pytest.mark.skipif(KERAS_2, reason="of the seeds of Keras 3")
def test_draws_without_a_seed_are_a_function_of_key_and_step():
    first = draws(3, 7)
    np.testing.assert_array_equal(draws(3, 7), first)
    others = [first[1], draws(3, 8)[0], draws(4, 7)[0], draws(3, 7, 3)[2]]
    assert all(np.abs(other - first[0]).max() > 0 for other in others)


@pytest.mark.skipif(KERAS_2, reason="of the seeds of Keras 3")
def test_the_global_generator_is_restored():
    keras.utils.set_random_seed(5)
    expected = [keras.random.uniform((2,)).numpy() for _ in range(2)]
    keras.utils.set_random_seed(5)
    found = [keras.random.uniform((2,)).numpy()]
    draws(0, 0)
    found.append(keras.random.uniform((2,)).numpy())
    np.testing.assert_array_equal(found, expected)
