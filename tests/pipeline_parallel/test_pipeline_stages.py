"""A pipeline's stages, what a batch comes to in them, and what cannot be one.

The gradients of larger networks are those of test_pipeline_gradients.py.
"""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.pipeline_parallel.gpipe import GPipe
from imagenet_fast.pipeline_parallel.pipeline import Pipeline

layers = keras.layers
# Names of the one device that there is.
DEVICES = ["/CPU:0", "/device:CPU:0", "CPU:0"]
VALUES = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
AIMS = np.random.default_rng(1).normal(size=(7, 2)).astype("float32")


def squares(outputs, targets):
    return tf.reduce_sum(tf.square(outputs - targets))


def compute(pipeline, inputs=VALUES, targets=AIMS, **options):
    """The step of a batch, in a graph as in training."""

    @tf.function
    def step(inputs, targets):
        found = pipeline.compute(inputs, targets, squares, **options)
        step.missing = [own is None for own in found.gradients]
        return found._replace(gradients=[own for own in found.gradients if own is not None])

    pipeline(inputs)
    return step(tf.constant(inputs), tf.constant(targets)), step.missing


def taped(pipeline, examples=7):
    """The same of the whole batch, without a pipeline."""
    with tf.GradientTape() as tape:
        outputs = pipeline(tf.constant(VALUES[:examples]), training=True)
        losses = [own for stage in pipeline.stages for own in stage.losses]
        loss, penalty = squares(outputs, AIMS[:examples]), tf.add_n([tf.constant(0.0), *losses])
        total = loss + penalty
    return outputs, tape.gradient(total, pipeline.variables), loss, penalty


def assert_close(found, expected, rtol=1e-5):
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=1e-5)


def test_a_balance_that_does_not_fit():
    with pytest.raises(UserError, match=r"balance \[2, 2\] is of 4 blocks, but there are 5"):
        Pipeline([layers.ReLU() for _ in range(5)], DEVICES[:1] * 2, balance=[2, 2])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0, but must be positive"),
        ({"schedule": "1b1f"}, "schedule='1b1f' does not exist; did you mean '1f1b'"),
        ({"rematerialize": "x"}, "'x' does not exist; choose from always, except_last, never"),
    ],
)
def test_options_that_are_none(options, told):
    with pytest.raises(UserError, match=told):
        Pipeline([layers.ReLU()], DEVICES[:1], **options)


class Needed(layers.Layer):
    def call(self, inputs, training, factor=2.0):
        return inputs * factor if training else inputs


def test_a_block_of_several_inputs():
    blocks = [layers.Dense(3), layers.MultiHeadAttention(2, 3, name="attention")]
    told = r"'attention' takes 2 inputs \(query, value\).*wrap it in a layer whose call\(self, inp"
    with pytest.raises(UserError, match=told):
        Pipeline(blocks, DEVICES[:2])
    Pipeline([layers.Add(), Needed()], DEVICES[:2])


@pytest.mark.parametrize("make", [GPipe, Pipeline])
def test_the_keras_of_tensorflow_2_15_is_refused(make, monkeypatch):
    monkeypatch.setattr("imagenet_fast.pipeline_parallel.pipeline.KERAS_2", True)
    with pytest.raises(UserError, match=r"need Keras 3, but Keras [\d.]+\S* is installed: "):
        make([layers.Dense(3)], DEVICES[:1])


@pytest.mark.parametrize("block", [tf.nn.relu, "relu"])
def test_a_block_that_is_no_layer(block):
    with pytest.raises(UserError, match=r"relu.* cannot be a block.*takes Keras layers and models"):
        Pipeline([layers.Dense(3), block], DEVICES[:2])


def test_stages():
    blocks = [layers.Dense(4, name=f"dense{number}") for number in range(4)]
    pipeline = Pipeline(blocks, DEVICES, balance=[1, 2, 1], num_micro_batches=5)
    assert [stage.blocks for stage in pipeline.stages] == [blocks[:1], blocks[1:3], blocks[3:]]
    assert [stage.device for stage in pipeline.stages] == DEVICES
    assert pipeline.num_micro_batches == 5
    values = VALUES
    np.testing.assert_allclose(pipeline(values), keras.Sequential(blocks)(values), rtol=1e-6)
    names = [f"dense{number}/{own}" for number in range(4) for own in ("kernel", "bias")]
    assert [own.path for own in pipeline.variables] == names
    pipeline.check_placement()


@pytest.mark.parametrize(
    ("schedule", "rematerialize"),
    [
        ("gpipe", "always"),
        ("gpipe, looped", "except_last"),
        ("1f1b", "never"),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (
                *(("gpipe", "except_last"), ("gpipe", "never")),
                *(("gpipe, looped", "always"), ("gpipe, looped", "never")),
                *(("1f1b", "always"), ("1f1b", "except_last")),
            )
        ),
    ],
)
def test_a_step(schedule, rematerialize):
    blocks = [
        layers.Dense(5, "tanh", kernel_regularizer="l2"),
        layers.Dense(4, "tanh"),
        layers.Dense(2, bias_regularizer="l2", bias_initializer="ones"),
    ]
    pipeline = Pipeline(
        blocks,
        DEVICES,
        num_micro_batches=3,
        schedule=schedule.removesuffix(", looped"),
        unroll=not schedule.endswith("looped"),
        rematerialize=rematerialize,
    )
    step, missing = compute(pipeline)
    outputs, gradients, loss, penalty = taped(pipeline)
    assert not any(missing)
    assert_close([step.outputs, step.loss, step.penalty], [outputs, loss, penalty])
    assert_close(step.gradients, gradients, rtol=1e-4)
    assert penalty > 0


def test_the_scale_is_that_of_the_regularization():
    blocks = [layers.Dense(4, kernel_regularizer="l2"), layers.Dense(2)]
    pipeline = Pipeline(blocks, DEVICES[:2], num_micro_batches=2)
    step, _ = compute(pipeline, scale=tf.constant(8.0))
    _, _, loss, penalty = taped(pipeline)
    assert_close([step.loss, step.penalty], [loss, 8 * penalty])


def test_a_weight_without_part_in_the_loss_has_no_gradient():
    class Bypass(layers.Dense):
        def call(self, inputs):
            return inputs + self.bias

    pipeline = Pipeline([layers.Dense(2), Bypass(2)], DEVICES[:2], num_micro_batches=2)
    step, missing = compute(pipeline)
    assert missing == [False, False, True, False]
    assert_close(step.gradients, [own for own in taped(pipeline)[1] if own is not None], rtol=1e-4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("balance", [[1, 2], [2, 1]])
def test_weights_before_an_output_that_passes_no_gradients_have_none(schedule, balance):
    """Wherever the stages end: weight decay would change weights whose gradient is 0."""
    blocks = [layers.Dense(2), layers.Lambda(tf.stop_gradient), layers.Dense(2)]
    pipeline = Pipeline(
        blocks, DEVICES[:2], balance=balance, num_micro_batches=2, schedule=schedule
    )
    step, missing = compute(pipeline)
    assert missing == [True, True, False, False]
    assert_close(step.gradients, taped(pipeline)[1][2:], rtol=1e-4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_reads_weights(schedule, place):
    pipeline = Pipeline([layers.Dense(3), layers.Dense(2)], DEVICES[:2], schedule=schedule)
    pipeline(VALUES)
    weight, alone = pipeline.stages[place].variables[0], tf.Variable(2.0)

    @tf.function
    def step(*read):
        def loss(outputs, targets):
            return squares(outputs, targets) + tf.add_n([tf.reduce_sum(own) for own in read])

        return pipeline.compute(tf.constant(VALUES), tf.constant(AIMS), loss).loss

    with pytest.raises(UserError, match=f"the loss reads the weight {weight.path}, and a pipeline"):
        step(alone, weight.value)
    # Keras does not train other variables either.
    assert step(alone).shape == []


class Tied(layers.Layer):
    """Reads the weights of a layer that Keras does not find in it."""

    def __init__(self, layer):
        super().__init__()
        self.kernel = lambda: layer.kernel

    def call(self, inputs):
        return tf.matmul(inputs, self.kernel(), transpose_b=True)


def test_a_weight_that_a_block_of_another_stage_reads():
    def pipeline(balance):
        first = layers.Dense(4, name="first")
        return Pipeline([first, Tied(first), layers.Dense(2)], DEVICES[:2], balance=balance)

    with pytest.raises(UserError, match="first/kernel of stage 0 is read by a block of stage 1"):
        compute(pipeline([1, 2]))
    tied = pipeline([2, 1])
    step, _ = compute(tied)
    assert_close(step.gradients, taped(tied)[1], rtol=1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_layer_that_several_blocks_of_a_stage_share_is_trained_once(stages):
    shared = layers.Dense(4, "tanh", kernel_regularizer="l2")
    blocks = [shared, layers.ReLU(), keras.Sequential([shared]), layers.Dense(2)]
    pipeline = Pipeline(blocks, DEVICES[:stages], balance=[[4], [3, 1]][stages - 1])
    step, _ = compute(pipeline)
    _, gradients, _, penalty = taped(pipeline)
    assert len(step.gradients) == 4
    assert_close(step.gradients, gradients, rtol=1e-4)
    assert_close([step.penalty], [penalty])
    assert_close([penalty], [0.01 * np.sum(np.square(shared.kernel))])
    pipeline.check_placement()


def test_a_weight_that_stages_share():
    shared = layers.Dense(4, name="shared")
    blocks = [shared, layers.ReLU(), keras.Sequential([shared])]
    pipeline = Pipeline(blocks, DEVICES[:2], balance=[2, 1])
    told = "shared/kernel is shared by blocks of stages 0 and 1: put them into one stage"
    with pytest.raises(UserError, match=told):
        pipeline(VALUES)
    with pytest.raises(UserError, match=told):  # now that it is built
        Pipeline(blocks, DEVICES[:2], balance=[2, 1])


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.long), 3])
def test_moving_averages_move_and_dropout_counts_once_a_batch(parts):
    """Of batch norms that are blocks of their own, too."""
    alone, inside = (layers.BatchNormalization(momentum=0.5) for _ in range(2))
    dropout = Dropout(0.5)
    blocks = [alone, keras.Sequential([inside, dropout]), layers.Dense(2)]
    pipeline = Pipeline(blocks, DEVICES, num_micro_batches=parts)
    for times in (1, 2):
        compute(pipeline)
        mean = VALUES.mean(0) * (1 - 0.5**times)
        np.testing.assert_allclose(alone.moving_mean, mean, rtol=1e-4, atol=1e-6)
        assert np.all(np.abs(inside.moving_variance - 1) > 1e-4)
        assert dropout.state.numpy()[1] == times
    np.testing.assert_allclose(alone.moving_variance, 0.25 + 0.75 * VALUES.var(0), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("known", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize(
    "form",
    ["gpipe", *(pytest.param(form, marks=pytest.mark.long) for form in ("gpipe, looped", "1f1b"))],
)
def test_a_batch_smaller_than_the_number_of_micro_batches(form, known):
    """Moving averages and regularization count each example once, too."""
    norm = layers.BatchNormalization(momentum=0.5)
    pipeline = Pipeline(
        [layers.Dense(3, activity_regularizer="l2"), norm, layers.Dense(2)],
        DEVICES[:2],
        num_micro_batches=4,
        schedule=form.removesuffix(", looped"),
        unroll=not form.endswith("looped"),
    )
    pipeline(VALUES)
    values, targets = VALUES[:3], AIMS[:3]
    norm.trainable = False  # else each example would be normalized alone
    aims = taped(pipeline, 3)
    norm.trainable = True

    def step(inputs, targets):
        norm.trainable = False
        frozen = pipeline.compute(inputs, targets, squares)
        norm.trainable = True
        pipeline.compute(inputs, targets, squares)
        return frozen

    size = len(values) if known else None
    step = tf.function(step, input_signature=[tf.TensorSpec([size, 4]), tf.TensorSpec([size, 2])])
    outputs, gradients, loss, penalty = step(values, targets)
    assert_close([outputs, loss, penalty], [aims[0], *aims[2:]])
    assert_close(gradients, aims[1], rtol=1e-4)
    hidden = pipeline.stages[0].blocks[0](values)
    np.testing.assert_allclose(norm.moving_mean, np.mean(hidden, axis=0) / 2, rtol=1e-4, atol=1e-6)


def test_python_in_a_stage():
    python = layers.Lambda(
        lambda x: tf.ensure_shape(tf.py_function(np.sin, [x], tf.float32), [None, 3]), name="sine"
    )
    pipeline = Pipeline(
        [layers.Dense(3, name="first"), python, layers.Dense(2)], DEVICES[:2], balance=[2, 1]
    )
    with pytest.raises(UserError, match=r"^sine\w*/.*, in the stage first -> sine, calls Python"):
        compute(pipeline)


def test_masks_reach_the_next_stage():
    blocks = [layers.Embedding(9, 3, mask_zero=True, name="rows"), layers.GlobalAveragePooling1D()]
    numbers = tf.constant([[1, 2, 0], [3, 0, 0]])
    expected = blocks[1](blocks[0](numbers))
    assert np.abs(expected - tf.reduce_mean(blocks[0](numbers), axis=1)).max() > 1e-3
    np.testing.assert_allclose(Pipeline(blocks, DEVICES[:2])(numbers), expected, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_loops_in_a_block_outlive_the_trace(schedule):
    """TensorFlow deletes a loop's functions with the graph in which they were traced."""
    blocks = [layers.Reshape([4, 1]), layers.SimpleRNN(3), layers.Dense(2)]
    pipeline = Pipeline(blocks, DEVICES[:2], num_micro_batches=2, schedule=schedule)
    pipeline(VALUES)

    @tf.function
    def step(inputs, targets):
        gradients = pipeline.compute(inputs, targets, squares).gradients
        gc.collect()
        return gradients

    assert_close(step(VALUES, AIMS), taped(pipeline)[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("GPU:99", "device 'GPU:99' does not exist; there are /device:CPU:0"),
        ("CPU:7", "device 'CPU:7' does not exist"),
        ("accelerator", "'accelerator' is no name of a device, such as 'GPU:0'"),
    ],
)
def test_devices_that_do_not_exist(device, told):
    with pytest.raises(UserError, match=told):
        Pipeline([layers.Dense(2), layers.Dense(2)], ["CPU:0", device])


class Twice(layers.Layer):
    """Calls a dropout layer twice."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def call(self, inputs, training=None):
        ones = tf.ones_like(inputs)
        return 0 * inputs[:, tf.newaxis] + tf.stack(
            [self.dropout(ones, training=training) for _ in range(2)], axis=1
        )


@pytest.mark.parametrize("rematerialize", ["always", "never"])
def test_a_dropout_that_is_called_twice_draws_twice(rematerialize):
    pipeline = Pipeline(
        [layers.Dense(50), Twice(Dropout(0.5)), layers.Flatten()],
        DEVICES[:2],
        num_micro_batches=2,
        rematerialize=rematerialize,
    )
    pipeline(VALUES)
    step = tf.function(
        lambda inputs: pipeline.compute(inputs, (), lambda out, _: tf.reduce_sum(out)).outputs
    )
    first, second = np.split(step(VALUES).numpy(), 2, axis=1)
    assert np.mean(first != second) == pytest.approx(0.5, abs=0.15)
    again = np.split(step(VALUES).numpy(), 2, axis=1)[0]
    assert np.any(first != again)


class Attention(layers.Layer):
    """Self-attention with Keras' own dropout."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.5)

    def call(self, inputs, training=None):
        inputs = inputs[:, :, tf.newaxis]
        return tf.reduce_sum(self.attention(inputs, inputs, training=training), axis=-1)


def noisy(make, rematerialize, schedule="gpipe"):
    blocks = [layers.Dense(4), make(), layers.Dense(2, use_bias=False)]
    return Pipeline(
        blocks,
        DEVICES[:2],
        balance=[2, 1],
        num_micro_batches=2,
        rematerialize=rematerialize,
        schedule=schedule,
    )


@pytest.mark.parametrize(
    "make", [lambda: layers.Dropout(0.5), pytest.param(Attention, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.long)])
def test_dropout_of_keras_is_recomputed_as_it_was(make, schedule):
    steps = []
    for rematerialize in ("always", "never"):
        keras.utils.set_random_seed(1)
        pipeline = noisy(make, rematerialize, schedule)
        steps.append([compute(pipeline)[0] for _ in range(2)])
    for own, other in zip(*steps):
        assert_close(own.gradients, other.gradients, rtol=1e-4)
        assert_close([own.outputs], [other.outputs])
    first, second = (step.outputs for step in steps[0])
    assert np.any(first != second)


def test_dropout_of_keras_differs_by_micro_batch_and_batch():
    keras.utils.set_random_seed(1)
    pipeline = Pipeline(
        [layers.ReLU(), layers.Dropout(0.5), layers.Activation("linear")],
        DEVICES[:2],
        num_micro_batches=2,
    )
    ones = np.ones([2, 100], "float32")
    (first, second), (third, _) = (compute(pipeline, ones, 0 * ones)[0].outputs for _ in range(2))
    for one, other in ((first, second), (first, third)):
        assert np.mean(one != other) == pytest.approx(0.5, abs=0.2)


def test_random_numbers_that_cannot_be_repeated():
    class Noise(layers.Layer):
        def call(self, inputs, training=None):
            return inputs + tf.random.normal(tf.shape(inputs)) if training else inputs

    with pytest.raises(UserError, match=r"draws random numbers.*or rematerialize='never'"):
        compute(noisy(Noise, "except_last"))
    step, _ = compute(noisy(Noise, "never"))
    assert all(np.isfinite(gradient).all() for gradient in step.gradients)


def test_the_mask_of_dropout_of_keras_is_that_of_the_forward_pass():
    """Of x * w with w = 1: its gradient is the sum of the outputs, if the loss is their sum."""

    class Scale(layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(name="scale", shape=[50], initializer="ones")

        def call(self, inputs):
            return inputs * self.scale

    blocks = [Scale(), layers.Dropout(0.5), layers.Activation("linear")]
    pipeline = Pipeline(
        blocks, DEVICES[:2], balance=[2, 1], num_micro_batches=2, rematerialize="never"
    )
    inputs = tf.constant(np.random.default_rng(0).normal(size=(6, 50)).astype("float32"))
    pipeline(inputs)

    @tf.function
    def step(inputs):
        return pipeline.compute(inputs, (), lambda outputs, _: tf.reduce_sum(outputs))

    outputs, (gradient,), *_ = step(inputs)
    assert 0.3 < np.mean(outputs == 0) < 0.7
    np.testing.assert_allclose(gradient, np.sum(outputs, axis=0), rtol=1e-5, atol=1e-5)
