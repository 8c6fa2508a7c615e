"""The balance that GPipe chooses, and functional models that it cuts."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import UserError, models
from imagenet_fast.base.notices import warn_once
from imagenet_fast.lab.planning.pipeline import plan_pipeline
from imagenet_fast.pipeline_parallel.gpipe import GPipe

layers = keras.layers
# Several names of the one device that a process has.
DEVICES = ["CPU:0"] * 3
IMAGES = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype("float32")
LABELS = np.arange(6) % 3
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def blocks():
    """Five, of which the first has most of the work."""
    first = layers.Conv2D(64, 3, padding="same", name="first")
    others = [layers.Conv2D(2, 1, name=f"conv{number}") for number in range(2)]
    return [first, *others, layers.Flatten(), layers.Dense(3, name="logits")]


def functional():
    """A user's network with a skip connection, batch norm and a pool."""
    keras.utils.set_random_seed(1)
    inputs = values = keras.Input([8, 8, 3])
    values = layers.Conv2D(8, 3, padding="same", activation="tanh", name="stem")(values)
    skipped = values
    values = layers.BatchNormalization(name="norm")(values)
    values = layers.Conv2D(8, 3, padding="same", activation="tanh", name="conv")(values)
    values = layers.Add(name="add")([values, skipped])
    values = layers.GlobalAveragePooling2D(name="pool")(values)
    return keras.Model(inputs, layers.Dense(3, name="logits")(values), name="plain")


def balance(model):
    return [len(stage.blocks) for stage in model.pipeline.stages]


@pytest.mark.parametrize("first", ["predict", "call", "fit"])
def test_the_balance_is_chosen_when_the_inputs_are_known(first):
    model = GPipe(blocks(), DEVICES[:2], num_micro_batches=2)
    assert model.pipeline.stages == []
    model.compile("sgd", SPARSE)
    {
        "predict": lambda: model.predict(IMAGES, verbose=0),
        "call": lambda: model(IMAGES),
        "fit": lambda: model.fit(IMAGES, LABELS, verbose=0),
    }[first]()
    assert balance(model) == [1, 4]


@pytest.mark.long
def test_it_is_the_plans():
    """For a network of the package, which a function makes."""
    config = SMALL.replace(accumulation_steps=4, pipeline_stages=3)
    plan = plan_pipeline(config)

    def make():
        return models.build("resnet8", 10, (16, 16, 3))

    model = GPipe(make, DEVICES, num_micro_batches=4)
    assert balance(model) == list(plan.balance)
    assert [block.name for block in model.blocks] == [cost.name for cost in plan.costs]


@pytest.mark.long
def test_a_functional_model_keeps_its_weights_and_trains_as_before():
    plain = functional()
    plain.set_weights([weight + 0.1 for weight in plain.get_weights()])
    model = GPipe(plain, DEVICES[:2])
    assert len(model.pipeline.stages) == 2
    np.testing.assert_allclose(model(IMAGES), plain(IMAGES), rtol=1e-5)
    for each in (plain, model):
        each.compile("sgd", SPARSE)
        each.fit(IMAGES, LABELS, batch_size=6, verbose=0)
    for own, other in zip(model.trainable_weights, plain.trainable_weights):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 6])
def test_no_number_of_micro_batches_makes_it_slow(monkeypatch, batch_size):
    """A batch has no more micro-batches than examples, and the balance needs few."""
    counts = []

    def balance_for(*_, batch_size, micro_batches, **__):
        counts.append((batch_size, micro_batches))
        return [1, 4]

    monkeypatch.setattr("imagenet_fast.pipeline_parallel.gpipe.balance_for", balance_for)
    model = GPipe(blocks(), DEVICES[:2], num_micro_batches=10**6, batch_size=batch_size)
    model.build_on(IMAGES[:0] if batch_size else tf.TensorSpec([None, 8, 8, 3]))
    assert counts == [(6, 6) if batch_size else (64 * 32, 64)]


def lookup():
    words = keras.Input([4], dtype="int64")
    layer = layers.IntegerLookup()
    layer.adapt(np.array([[5, 7, 9, 11]]))
    return words, layers.Dense(2)(layers.Flatten()(layers.Embedding(6, 2)(layer(words))))


def bins():
    values = keras.Input([4])
    layer = layers.Discretization(num_bins=3)
    layer.adapt(np.arange(40.0).reshape(10, 4))
    return values, layers.Dense(2)(tf.cast(layer(values), tf.float32))


@pytest.mark.parametrize("make", [lookup, bins])
def test_layers_that_were_adapted_to_data(make):
    model, values = keras.Model(*make()), np.array([[5, 7, 9, 30], [11, 5, 1, 2]])
    pipeline = GPipe(model, DEVICES[:2])
    np.testing.assert_allclose(pipeline(values), model(values), rtol=1e-6)


def test_a_functional_model_with_a_given_balance():
    assert balance(GPipe(functional, DEVICES[:2], balance=[1, 3])) == [1, 3]


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (None, [1, 3]),
        # Weights, gradients and two slots take 16 bytes a weight: 41 MiB in the last two blocks.
        (60, [1, 3]),
        (35, [3, 1]),
        (25, None),
    ],
)
def test_stages_fit_into_the_devices_memory(mib, expected):
    network = [
        layers.Dense(512, use_bias=False),  # of each of 100 positions: most of the work
        layers.GlobalAveragePooling1D(),
        layers.Dense(1400, use_bias=False),
        layers.Dense(1400, use_bias=False),
    ]
    memory = None if mib is None else mib / 1024
    options = {"num_micro_batches": 4, "device_memory_gb": memory, "batch_size": 4}
    model = GPipe(network, DEVICES[:2], **options)
    inputs = tf.TensorSpec([None, 100, 512])
    if expected is None:
        with pytest.raises(UserError, match="do not fit into 2 stages"):
            model.build_on(inputs)
    else:
        model.build_on(inputs)
        assert balance(model) == expected


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (2, {"balance": [3, 2]}, r"balance \[3, 2\] does not fit into devices of 1e-05 GiB"),
        pytest.param(1, {}, "5 blocks do not fit into 1 stages", marks=pytest.mark.long),
        pytest.param(5, {}, "5 blocks do not fit into 5 stages", marks=pytest.mark.long),
    ],
)
def test_the_only_balance_is_checked_against_the_limit(stages, options, message):
    options = {"num_micro_batches": 2, "batch_size": 2, **options}
    for limit in (1e-5, 1):
        model = GPipe(blocks(), ["CPU:0"] * stages, device_memory_gb=limit, **options)
        assert len(model.pipeline.stages) == stages
        if limit == 1:
            model.build_on(tf.TensorSpec([None, 8, 8, 3]))
            continue
        for _ in range(2):
            with pytest.raises(UserError, match=message):
                model.build_on(tf.TensorSpec([None, 8, 8, 3]))


def test_a_given_balance_of_a_functional_model_is_checked_against_the_limit():
    options = {"batch_size": 2, "device_memory_gb": 1e-6}
    with pytest.raises(UserError, match=r"balance \[1, 3\] does not fit"):
        GPipe(functional, DEVICES[:2], balance=[1, 3], **options)
    with pytest.raises(UserError, match="is of 2 blocks"):
        GPipe(functional, DEVICES[:2], balance=[1, 1], **options)


@pytest.mark.parametrize("options", [{"costs": "measured"}, {"device_memory_gb": 1}])
def test_memory_and_seconds_need_the_batch_size(options):
    model = GPipe(blocks(), DEVICES[:2], **options)
    with pytest.raises(UserError, match="give GPipe a batch_size"):
        model.build_on(tf.TensorSpec([None, 8, 8, 3]))


@pytest.mark.long
def test_measured_work():
    model = GPipe(functional, DEVICES[:2], costs="measured", batch_size=64)
    assert sum(balance(model)) == 4


class Wrapped(layers.Layer):
    """Without a get_config, which Keras cannot make of another layer."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


class WrappedModel(keras.Model):
    """The same as a model, whose get_config is then empty."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


@pytest.mark.parametrize("kind", [Wrapped, WrappedModel])
def test_blocks_of_unknown_work(kind, capsys):
    warn_once.cache_clear()
    model = GPipe([*blocks(), kind(layers.Dense(2), name="last")], DEVICES[:2])
    model(IMAGES)
    assert balance(model) == [3, 3]
    assert "cannot be estimated, because 'last' has no get_config" in capsys.readouterr().err


class Custom(layers.Layer):
    """Not registered with Keras."""

    def call(self, inputs):
        return 2 * inputs


def test_layers_that_keras_cannot_load_are_counted():
    nested = keras.Sequential([Custom(), layers.Lambda(lambda values: values + 1)])
    model = GPipe([*blocks(), nested], DEVICES[:2])
    model(IMAGES)
    assert balance(model) == [1, 5]


@pytest.mark.parametrize("model", [layers.Dense(3), WrappedModel(layers.Dense(3))])
def test_models_that_cannot_be_cut(model):
    name = re.escape(type(model).__name__)
    with pytest.raises(UserError, match=f"a {name} cannot be cut .* write the blocks yourself"):
        GPipe(model, DEVICES[:2])
