"""Evaluation and prediction in micro-batches, against plain Keras models."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.pipeline_parallel.gpipe import GPipe

layers = keras.layers
# Several names of the one device that a process has.
DEVICES = ["CPU:0"] * 3
EXAMPLES = 13
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(EXAMPLES, 6, 6, 3)).astype("float32")
LABELS = np.arange(EXAMPLES) % 3
WEIGHTS = np.linspace(0.5, 2, EXAMPLES, dtype="float32")
# Padded with 0, which is masked.
WORDS = RANDOM.integers(1, 9, size=(EXAMPLES, 5)) * (np.arange(5) < RANDOM.integers(2, 6, (13, 1)))
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Center(layers.Layer):
    """Adds a loss that is a mean over the examples."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.square(inputs)))
        return inputs


class Two(layers.Layer):
    """Returns two outputs by name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return {"logits": self.dense(inputs), "sum": tf.reduce_sum(inputs, axis=-1, keepdims=True)}


def image_blocks():
    keras.utils.set_random_seed(1)
    regularizer = keras.regularizers.L2(0.1)
    return [
        layers.Conv2D(4, 3, activation="tanh", kernel_regularizer=regularizer),
        layers.BatchNormalization(momentum=0.5),
        Dropout(0.5),
        Center(),
        layers.Flatten(),
        layers.Dense(3),
    ]


def two_output_blocks():
    keras.utils.set_random_seed(1)
    return [layers.Flatten(), layers.Dense(5, activation="tanh"), Two()]


def tagger_blocks():
    keras.utils.set_random_seed(1)
    return [layers.Embedding(9, 4, mask_zero=True), layers.Dense(3)]


CASES = {
    "images": (image_blocks, IMAGES, LABELS, SPARSE),
    "two outputs": (
        two_output_blocks,
        IMAGES,
        {"logits": LABELS, "sum": LABELS[:, None].astype("float32")},
        {"logits": SPARSE, "sum": "mse"},
    ),
    "masked": (tagger_blocks, WORDS, WORDS % 3, SPARSE),
}


def plain(blocks, images=IMAGES):
    values = inputs = keras.Input(images.shape[1:], dtype=images.dtype)
    for block in blocks:
        values = block(values)
    return keras.Model(inputs, values)


def pipelined(blocks, images=IMAGES):
    return GPipe(blocks, DEVICES[:2], num_micro_batches=4)


# Losses of masked outputs are in test_losses.py, too.
@pytest.fixture(
    scope="module",
    params=[
        "images",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("two outputs", "masked")),
    ],
)
def case(request):
    """A plain model, a pipeline with the same weights, the images and the labels."""
    make, images, labels, loss = CASES[request.param]
    blocks = make(), make()
    made = plain(blocks[0], images), pipelined(blocks[1], images)
    for model in made:
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
        model(images)
    for one, other in zip(*blocks):
        other.set_weights(one.get_weights())
    return *made, images, labels


# The last batch of 12 has one example; 3 are fewer than there are micro-batches.
@pytest.mark.parametrize("batch_size", [12, 3])
def test_they_are_those_of_the_plain_model(case, batch_size):
    model, pipeline, images, labels = case
    options = {"batch_size": batch_size, "verbose": 0}
    for evaluated in (
        lambda own: own.predict(images, **options),
        lambda own: own.evaluate(images, labels, sample_weight=WEIGHTS, **options),
    ):
        tf.nest.map_structure(
            lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6),
            evaluated(pipeline),
            evaluated(model),
        )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (tf.ragged.constant([[[1.0]], []], ragged_rank=1), "ragged inputs: pad them"),
        (tf.sparse.from_dense([[0.0, 1.0]]), "sparse inputs: use tf.sparse.to_dense"),
    ],
)
def test_inputs_that_cannot_be_split(inputs, message):
    for use in (GPipe.__call__, GPipe.predict):
        with pytest.raises(UserError, match=message):
            use(GPipe([layers.Dense(2)] * 2, DEVICES[:2], balance=[1, 1]), inputs)


def test_a_row_for_each_position():
    """As [batch * positions, classes], of which predict would return the first ones."""
    blocks = [layers.Dense(3), layers.Lambda(lambda x: tf.reshape(x, [-1, 3]))]
    model = GPipe(blocks, DEVICES[:2], num_micro_batches=2, balance=[1, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"rows and examples:. .20. .4"):
        model.predict(np.zeros([4, 5, 2]), verbose=0)


def test_batches_of_known_size(case):
    """The last batch of 8, 5 examples, has micro-batches of unequal size."""
    model, pipeline, images, labels = case
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.take(8).batch(8, drop_remainder=True).concatenate(data.skip(8).batch(5))
    np.testing.assert_allclose(
        pipeline.evaluate(data, verbose=0), model.evaluate(data, verbose=0), rtol=1e-6, atol=1e-6
    )


@pytest.mark.long
def test_validation_in_fit():
    histories = []
    for build in (plain, pipelined):
        keras.utils.set_random_seed(1)
        model = build([layers.Flatten(), layers.Dense(3, "tanh"), layers.Dense(3, name="last")])
        model.compile("sgd", SPARSE, metrics=["accuracy"])
        model(IMAGES)
        options = {"validation_data": (IMAGES, LABELS), "validation_batch_size": 6, "verbose": 0}
        histories.append(model.fit(IMAGES, LABELS, batch_size=13, epochs=2, **options).history)
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    assert "val_accuracy" in histories[0]


class Busy(layers.Layer):
    """Notes the largest batch, and how many calls there are at the same time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.batches, self.now, self.most = [], 0, 0

    def call(self, inputs, training=None):
        if training is not False:
            return inputs

        def wait(values):
            self.batches.append(len(values))
            self.now += 1
            self.most = max(self.most, self.now)
            time.sleep(0.01)
            self.now -= 1
            return values

        # Else TensorFlow itself would run one call after another.
        outputs = tf.numpy_function(wait, [inputs], inputs.dtype, stateful=False)
        outputs.set_shape(inputs.shape)
        return outputs


def test_a_stage_has_one_micro_batch_at_a_time():
    busy = Busy()
    model = GPipe([layers.Flatten(), busy], DEVICES[:2], num_micro_batches=6)
    model.predict(IMAGES, batch_size=EXAMPLES, verbose=0)
    assert sorted(busy.batches) == [2, 2, 2, 2, 2, 3]
    assert busy.most == 1


@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_a_step_is_traced_once(monkeypatch, method):
    model, traced = pipelined([layers.Flatten(), layers.Dense(3)]), []
    model.compile("sgd", SPARSE)
    predict = model.pipeline.predict
    monkeypatch.setattr(model.pipeline, "predict", lambda *args: traced.append(1) or predict(*args))
    data = {"predict": [IMAGES], "evaluate": [IMAGES, LABELS]}[method]
    for _ in range(2):
        getattr(model, method)(*data, batch_size=13, verbose=0)
    assert len(traced) == 1
