"""Losses of any kind: a pipeline's step against Keras' own, with one tape over the whole batch."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.layers.seeds import count, seed_states
from imagenet_fast.pipeline_parallel.gpipe import GPipe

layers = keras.layers
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
DEVICES = ["CPU:0"] * 4
EXAMPLES = 10
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(EXAMPLES, 8, 8, 3)).astype("float32")
LABELS = np.arange(EXAMPLES) % 3
# Most pixels of class 2 are in the first images.
PIXELS = RANDOM.integers(0, 3, (EXAMPLES, 8, 8))
PIXELS[:4, 2:] = 2
LENGTHS = np.arange(EXAMPLES) % 4 + 1
WORDS = np.where(np.arange(4) < LENGTHS[:, None], RANDOM.integers(1, 9, (EXAMPLES, 4)), 0)
WEIGHTS = np.linspace(0, 2, EXAMPLES, dtype="float32")


class Down(layers.Layer):
    """Half of a U-Net's left side: appends its features to the skip connections."""

    def __init__(self, channels):
        super().__init__()
        self.conv = layers.Conv2D(channels, 3, 2, padding="same", activation="tanh")

    def call(self, inputs):
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return (*inputs, self.conv(inputs[-1]))


class Up(layers.Layer):
    """Joins the last features with the skip connection before them."""

    def __init__(self, channels):
        super().__init__()
        self.conv = layers.Conv2DTranspose(channels, 3, 2, padding="same", activation="tanh")

    def call(self, inputs):
        *rest, skip, last = inputs
        joined = tf.concat([skip, self.conv(last)], axis=-1)
        return (*rest, joined) if rest else joined


class Patches(layers.Layer):
    """A vision transformer's tokens: patches of 2x2 pixels with a learned position each."""

    def build(self, input_shape):
        self.patch = layers.Conv2D(6, 2, 2)
        self.position = self.add_weight(name="position", shape=[1, 16, 6], initializer="normal")

    def call(self, inputs):
        return tf.reshape(self.patch(inputs), [-1, 16, 6]) + self.position


class Encoder(layers.Layer):
    """A vision transformer's block, which uses its dropout layer twice."""

    def __init__(self):
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        # Biases of keys have no gradient.
        self.attention = layers.MultiHeadAttention(2, 3, use_bias=False)
        self.hidden = layers.Dense(8, "gelu")
        self.back = layers.Dense(6)
        self.dropout = Dropout(0.3)

    def call(self, inputs, training=None):
        tokens = self.norms[0](inputs)
        attended = self.attention(tokens, tokens)
        inputs = inputs + self.dropout(attended, training=training)
        outputs = self.back(self.hidden(self.norms[1](inputs)))
        return inputs + self.dropout(outputs, training=training)


class TwoHeads(layers.Layer):
    def __init__(self):
        super().__init__()
        self.label = layers.Dense(3, name="label")
        self.size = layers.Dense(1, name="size")

    def call(self, inputs):
        return {"label": self.label(inputs), "size": self.size(inputs)}


class Penalized(layers.Dense):
    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(tf.reduce_mean(tf.square(outputs)))
        return outputs


def classifier(last=3):
    return [
        layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2"),
        layers.Flatten(),
        layers.Dense(5, "tanh"),
        last if isinstance(last, layers.Layer) else layers.Dense(last),
    ]


def unet():
    return [Down(4), Down(5), Up(4), Up(3)]


def vision_transformer():
    return [
        Patches(),
        Encoder(),
        Encoder(),
        keras.Sequential([layers.GlobalAveragePooling1D(), layers.Dense(3)]),
    ]


def tagger():
    return [
        layers.Embedding(9, 4, mask_zero=True),
        layers.SimpleRNN(4, return_sequences=True),
        layers.Dense(5, "tanh"),
        layers.Dense(3),
    ]


def lstm_classifier():
    return [
        layers.Embedding(9, 4, mask_zero=True),
        layers.Dense(5, "tanh"),
        layers.LSTM(4),
        layers.Dense(3),
    ]


def contrastive(labels, outputs):
    """Each image against all others, of which those of its class are near."""
    labels = tf.reshape(labels, [-1, 1])
    outputs = tf.math.l2_normalize(outputs, axis=-1)
    same = tf.cast(labels == tf.transpose(labels), tf.float32)
    return -tf.reduce_sum(same * tf.nn.log_softmax(outputs @ tf.transpose(outputs) / 0.5), axis=-1)


def above_average(labels, outputs):
    """A policy gradient, whose value is always 0, but not its gradient."""
    advantage = tf.stop_gradient(tf.nn.relu(outputs - tf.reduce_mean(outputs, axis=0)))
    return tf.reduce_sum(advantage * (outputs - tf.stop_gradient(outputs)), axis=-1)


def by_hand(labels, outputs):
    """A mean over the examples, which a function does not say of itself."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.cast(labels, tf.int32), logits=outputs
    )


class Case(NamedTuple):
    """A network, its data and its loss; and whether 1f1b takes it, and the network has dropout."""

    blocks: object
    inputs: np.ndarray
    labels: object
    loss: object
    loss_weights: object = None
    weights: np.ndarray | None = None
    splits: bool = True
    noisy: bool = False


LABEL_AND_SIZE = {"label": LABELS, "size": WEIGHTS[:, np.newaxis]}
CASES = {
    "U-Net, ignore_class": Case(
        unet, IMAGES, PIXELS, CROSS_ENTROPY(from_logits=True, ignore_class=2), splits=False
    ),
    "U-Net, mean": Case(unet, IMAGES, PIXELS, CROSS_ENTROPY(from_logits=True)),
    "sum": Case(classifier, IMAGES, LABELS, CROSS_ENTROPY(from_logits=True, reduction="sum")),
    "weights": Case(classifier, IMAGES, LABELS, CROSS_ENTROPY(from_logits=True), weights=WEIGHTS),
    "function": Case(classifier, IMAGES, LABELS, by_hand),
    "masked tagger": Case(tagger, WORDS, WORDS % 3, CROSS_ENTROPY(from_logits=True), splits=False),
    "masked tagger, sum": Case(
        tagger, WORDS, WORDS % 3, CROSS_ENTROPY(from_logits=True, reduction="sum")
    ),
    "LSTM classifier": Case(lstm_classifier, WORDS, LABELS, CROSS_ENTROPY(from_logits=True)),
    "vision transformer": Case(
        vision_transformer, IMAGES, LABELS, CROSS_ENTROPY(from_logits=True), noisy=True
    ),
    "contrastive": Case(classifier, IMAGES, LABELS, contrastive, splits=False),
    "above average": Case(classifier, IMAGES, LABELS, above_average, splits=False),
    "two outputs": Case(
        functools.partial(classifier, TwoHeads()),
        IMAGES,
        LABEL_AND_SIZE,
        {"label": CROSS_ENTROPY(from_logits=True), "size": "mse"},
        {"label": 0.25, "size": 3.0},
    ),
    "two outputs, weights": Case(
        functools.partial(classifier, TwoHeads()),
        IMAGES,
        LABEL_AND_SIZE,
        {"label": CROSS_ENTROPY(from_logits=True), "size": "mse"},
        weights={"label": WEIGHTS, "size": WEIGHTS[::-1].copy()},
    ),
    "a mean and a sum": Case(
        functools.partial(classifier, TwoHeads()),
        IMAGES,
        LABEL_AND_SIZE,
        {"label": CROSS_ENTROPY(from_logits=True, reduction="sum"), "size": "mse"},
        splits=False,
    ),
    "add_loss": Case(
        functools.partial(classifier, Penalized(3)),
        IMAGES,
        LABELS,
        CROSS_ENTROPY(from_logits=True),
    ),
}
NO_SUM = (
    tf.errors.InvalidArgumentError,
    "(?s)not a mean or a sum over the examples.*use schedule=.*gpipe",
)
REFUSALS = {
    "U-Net, ignore_class": (UserError, "not of ignore_class=2, whose number differs.*'gpipe'"),
    "masked tagger": (UserError, "a mean over the unmasked ones of masked outputs.*'gpipe'"),
    "a mean and a sum": (UserError, "some are means and others sums.*'gpipe'"),
    "contrastive": NO_SUM,
    "above average": NO_SUM,
}
QUICK_REFUSALS = ("masked tagger", "a mean and a sum", "above average")


class Chain(keras.Model):
    """The blocks as a plain Keras model, with Keras' own step."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def call(self, inputs, training=None):
        for block in self.blocks:
            inputs = block(inputs, training=training)
        return inputs


class NoisyChain(Chain):
    """The same with the dropout masks of a pipeline with this number of micro-batches."""

    def __init__(self, blocks, parts):
        super().__init__(blocks)
        self.sizes = [len(part) for part in np.array_split(range(EXAMPLES), parts)]

    def call(self, inputs, training=None):
        if not training:
            return super().call(inputs)
        outputs = []
        for number, part in enumerate(tf.split(inputs, self.sizes)):
            with micro_batch(number):
                outputs.append(super().call(part, training=True))
        for state in seed_states(self):
            count(state)
        return tf.concat(outputs, axis=0)


def step(model, case, weights=None):
    """The weights before a step, its gradients, and all that Keras logs."""
    # A plain model eagerly, because tracing takes longer than a step.
    model.compile(
        keras.optimizers.SGD(1.0),
        case.loss,
        loss_weights=case.loss_weights,
        run_eagerly=not isinstance(model, GPipe),
    )
    model(case.inputs[:1])
    if weights is not None:
        model.set_weights(weights)
    before = model.get_weights()
    logs = model.train_on_batch(
        case.inputs, case.labels, sample_weight=case.weights, return_dict=True
    )
    return before, [a - b for a, b in zip(before, model.get_weights())], logs


@functools.cache
def plain(name, noise_of):
    """One step without a pipeline, with the dropout masks of this many micro-batches, if any."""
    keras.utils.set_random_seed(1)
    blocks = CASES[name].blocks()
    return step(NoisyChain(blocks, noise_of) if noise_of else Chain(blocks), CASES[name])


def assert_same_gradients(gradients, expected):
    """To a relative error of 1e-5 in norm: small elements of float32 sums have larger ones."""
    for gradient, other in zip(gradients, expected):
        assert np.linalg.norm(gradient - other) <= 1e-5 * np.linalg.norm(other)


def check(name, stages, micro_batches, **options):
    case = CASES[name]
    weights, expected, logs = plain(name, micro_batches if case.noisy else 0)
    model = GPipe(case.blocks(), DEVICES[:stages], num_micro_batches=micro_batches, **options)
    _, gradients, own_logs = step(model, case, weights)
    assert len(gradients) == len(expected)
    assert all(np.abs(gradient).max() > 1e-6 for gradient in expected)
    assert_same_gradients(gradients, expected)
    assert own_logs == pytest.approx(logs, rel=1e-5)


FEW = {
    "U-Net, ignore_class": (4, 3),
    "add_loss": (4, 3),
}
GRID = list(itertools.product((1, 2, 4), (1, 3, 4)))


def grid(names, few):
    """All pairs of stages and micro-batches of each case, of which all but a few are long."""
    return [
        pytest.param(name, *pair, marks=() if few.get(name) == pair else pytest.mark.long)
        for name in names
        for pair in GRID
    ]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), grid(CASES, FEW))
def test_gpipe(name, stages, micro_batches):
    check(name, stages, micro_batches)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("masked tagger", "except_last"),
        *(
            (name, keep)
            for name in CASES
            for keep in ("always", "never")
            # See the next test.
            if keep == "always" or not name.startswith(("masked tagger", "LSTM"))
        ),
    ],
)
def test_gpipe_with_loops(name, keep):
    check(name, 2, 4, unroll=False, rematerialize=keep)


@pytest.mark.long
def test_loops_do_not_store_what_loops_in_layers_keep(monkeypatch):
    """Without unroll, even a large graph of a SimpleRNN is unrolled instead."""
    monkeypatch.setattr("imagenet_fast.pipeline_parallel.pipeline._MOST_UNROLLED", 3)
    check("masked tagger", 2, 3, rematerialize="never")
    with pytest.raises(UserError, match="unroll=False cannot store the activations of layers that"):
        check("masked tagger", 2, 3, unroll=False, rematerialize="never")


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    grid(
        [name for name, case in CASES.items() if case.splits],
        {"function": (2, 4)},
    ),
)
def test_1f1b(name, stages, micro_batches):
    check(name, stages, micro_batches, schedule="1f1b")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "devices", "micro_batches"),
    [
        (name, *pair)
        for name, case in CASES.items()
        if case.splits
        for pair in ((1, 3), (2, 3), (2, 4))
    ],
)
def test_interleaved_1f1b(name, devices, micro_batches):
    """Two stages on each device."""
    check(
        name,
        devices,
        micro_batches,
        schedule="interleaved_1f1b",
        num_stages=2 * devices,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_REFUSALS else pytest.mark.long)
        for name in REFUSALS
    ],
)
def test_1f1b_refuses_what_does_not_split(name):
    case = CASES[name]
    assert not case.splits
    kind, message = REFUSALS[name]
    model = GPipe(case.blocks(), DEVICES[:2], num_micro_batches=3, schedule="1f1b")
    model.compile("sgd", case.loss)
    model.build_on(case.inputs)
    before = model.get_weights()
    with pytest.raises(kind, match=message):
        model.train_on_batch(case.inputs, case.labels)
    for weight, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.long
def test_1f1b_refuses_if_one_of_several_losses_does_not_split():
    """Also one whose gradient is much smaller than the other's."""
    model = GPipe(classifier(TwoHeads()), DEVICES[:2], num_micro_batches=3, schedule="1f1b")
    model.compile("sgd", {"label": contrastive, "size": "mse"})
    labels = {"label": LABELS, "size": 1e6 + WEIGHTS[:, np.newaxis]}
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a mean or a sum over the exam"):
        model.train_on_batch(IMAGES, labels)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_dict_of_losses_may_leave_outputs_out(schedule):
    class ThreeHeads(TwoHeads):
        def call(self, inputs):
            return {**super().call(inputs), "same": inputs}

    blocks = classifier(ThreeHeads())
    loss = {"label": CROSS_ENTROPY(from_logits=True), "size": "mse"}
    model = GPipe(blocks, DEVICES[:2], num_micro_batches=3, schedule=schedule)
    keras.utils.set_random_seed(1)
    plain_model = Chain(classifier(ThreeHeads()))
    case = Case(None, IMAGES, LABEL_AND_SIZE, loss)
    weights, expected, _ = step(plain_model, case)
    _, gradients, _ = step(model, case, weights)
    assert_same_gradients(gradients, expected)


def test_cases_that_are_refused_are_those_that_do_not_split():
    assert set(REFUSALS) == {name for name, case in CASES.items() if not case.splits}


def test_weights_of_no_block_are_refused():
    model = GPipe(classifier(), DEVICES[:2])
    model.temperature = keras.Variable(1.0, name="temperature")
    model.compile("sgd", CROSS_ENTROPY(from_logits=True))
    with pytest.raises(UserError, match="temperature belongs to the model but to no block"):
        model.train_on_batch(IMAGES, LABELS)


def test_losses_of_no_block_are_refused():
    model = GPipe(classifier(), DEVICES[:2])
    with pytest.raises(UserError, match="call add_loss in the call of a layer in a block"):
        model.add_loss(tf.constant(1.0))
