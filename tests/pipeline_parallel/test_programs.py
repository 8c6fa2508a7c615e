"""The programs of a stage against ``tape.gradient``, and what they refuse."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import BatchNormalization, Dropout
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.pipeline_parallel.programs import Programs, floats_of, spec_of, variables_behind
from imagenet_fast.pipeline_parallel.stage import Stage

layers = keras.layers
NUMBER, SHARE = 3, 0.25


def draw(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype("float32"))


class Fork(layers.Layer):
    """Returns two tensors of which one passes through, and a number that has no gradient."""

    def build(self, input_shape):
        self.conv = layers.Conv2D(5, 1, name="conv")
        super().build(input_shape)

    def call(self, inputs):
        return {"conv": self.conv(inputs), "rest": (inputs, tf.shape(inputs)[0])}


def noisy_stage():
    keras.utils.set_random_seed(1)
    blocks = [
        layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(0.1), name="first"),
        layers.BatchNormalization(name="norm"),
        Dropout(0.5, name="dropout"),
        keras.Sequential([layers.Activation("tanh"), layers.Dense(4, "relu")], name="both"),
        Fork(name="fork"),
    ]
    return Stage(blocks, "/CPU:0")


def squares(outputs, targets):
    """A loss."""
    aims = targets or [0.0] * 2
    return tf.add_n([tf.reduce_sum((own - aim) ** 2) for own, aim in zip(floats_of(outputs), aims)])


def taken(stage, inputs, *, keep, targets=(), loss=None, first=False, upstream=(), times=1):
    """What the programs make of a micro-batch, forward and then backward, some times over.

    Returns:
      The outputs, the gradients of the inputs and of the variables, the sums.
    """

    @tf.function(autograph=False)
    def step(inputs, targets, upstream):
        specs = tf.nest.map_structure(spec_of, (inputs, targets))
        programs = Programs(stage, *specs, loss, first=first)
        sums = programs.zeros()
        for _ in range(times):
            own = (NUMBER, SHARE, inputs, targets)
            outputs = activations = None
            if keep or loss is None:
                outputs, activations, sums = programs.forward(*own, sums, keep)
                assert (activations is not None) == keep
            found, back, sums = programs.backward(*own, upstream, activations, sums)
            assert (found is None) == (outputs is not None)
        found_gradients, _ = programs.gradients(sums, [True] * len(upstream))
        gradients = [0.0 if own is None else own for own in found_gradients]
        outputs = outputs if found is None else found
        return outputs.values, back, gradients, sums

    stage(inputs)
    return step(inputs, targets, list(upstream))


def expected(stage, inputs, *, targets=(), loss=None, upstream=()):
    """The same by a tape."""
    with micro_batch(NUMBER), tf.GradientTape() as tape:
        tape.watch(floats_of(inputs))
        outputs = stage(inputs, training=True)
        ends = floats_of(outputs) if loss is None else [loss(outputs, targets)]
        penalty = tf.add_n([tf.constant(0.0), *(tf.cast(own, tf.float32) for own in stage.losses)])
    gradients = tape.gradient(
        [*ends, penalty],
        [floats_of(inputs), stage.variables],
        output_gradients=[*(upstream or map(tf.ones_like, ends)), SHARE],
        unconnected_gradients="zero",
    )
    return outputs, *gradients, SHARE * penalty


def assert_close(found, aims, **tolerance):
    tf.nest.assert_same_structure(found, aims)
    for own, aim in zip(tf.nest.flatten(found), tf.nest.flatten(aims)):
        np.testing.assert_allclose(own, aim, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("loss", [None, squares])
def test_forward_and_backward(keep, loss):
    """With batch norm, dropout, regularization and several outputs."""
    stage, images = noisy_stage(), draw(6, 8, 8, 3)
    upstream = [] if loss else [draw(6, 6, 6, 5), draw(6, 6, 6, 4, seed=1)]
    stage(images)
    before = [own.numpy() for block in stage.blocks for own in block.variables]
    outputs, (back,), gradients, sums = taken(
        stage, images, keep=keep, loss=loss, upstream=upstream
    )
    after = [own.numpy() for block in stage.blocks for own in block.variables]
    assert_close(after, before, rtol=0)  # nothing has moved
    aims, (aim,), others, penalty = expected(stage, images, loss=loss, upstream=upstream)
    assert_close(outputs, aims)
    assert outputs["rest"][1] == 6
    assert_close([back, *gradients], [aim, *others], rtol=1e-4, atol=1e-4)
    assert_close(sums.penalty, penalty)
    assert_close(sums.loss, squares(aims, ()) if loss else 0.0, rtol=1e-5)
    assert all(np.abs(own).max() > 1e-3 for own in others if own.shape != [4])
    assert len(others) == len(stage.variables) == 8


@pytest.mark.parametrize("keep", [True, False])
def test_programs_have_no_state(keep):
    """In a loop, TensorFlow would call others in turn, whatever their devices."""
    stage, images = noisy_stage(), draw(6, 8, 8, 3)
    stage(images)
    upstream = [draw(6, 6, 6, 5), draw(6, 6, 6, 4, seed=1)]
    kinds = []

    @tf.function(autograph=False)
    def step():
        programs = Programs(stage, spec_of(images), (), None, first=False)
        own = (NUMBER, SHARE, images, ())
        _, activations, sums = programs.forward(*own, programs.zeros(), keep)
        programs.backward(*own, upstream, activations, sums)
        kinds.extend(own.type for own in tf.compat.v1.get_default_graph().get_operations())

    step.get_concrete_function()
    assert kinds.count("PartitionedCall") == 2
    assert "StatefulPartitionedCall" not in kinds


@pytest.mark.parametrize("keep", [True, False])
def test_micro_batches_add_up(keep):
    inputs, targets = draw(4, 3), draw(4, 2, seed=1)
    dense = layers.Dense(2, kernel_regularizer="l2")
    stage = Stage([layers.BatchNormalization(), dense], "/CPU:0")
    options = {"keep": keep, "targets": [targets], "loss": squares}
    _, _, gradients, sums = taken(stage, inputs, **options)
    _, _, twice, added = taken(stage, inputs, **options, times=2)
    assert_close(twice, [2 * own for own in gradients])
    assert_close(added.loss, 2 * sums.loss)
    assert_close(added.penalty, 2 * sums.penalty)
    assert_close(added.moments, [2 * own for own in sums.moments])
    assert_close(sums.penalty, SHARE * dense.losses[0])
    count, total, squared = sums.moments
    assert count == 4
    assert_close(total, np.sum(inputs, axis=0))
    assert_close(squared, np.sum(np.square(inputs), axis=0))


def test_a_first_stage_has_no_gradients_of_its_inputs():
    _, back, gradients, _ = taken(
        Stage([layers.Dense(2)], "/CPU:0"), draw(4, 3), keep=True, first=True, upstream=[draw(4, 2)]
    )
    assert back == []
    assert_close(gradients[0], np.transpose(draw(4, 3)) @ draw(4, 2))


def activations(*blocks, inputs):
    """What describes those that are kept."""
    stage = Stage(blocks, "/CPU:0")
    stage(inputs)

    @tf.function(autograph=False)
    def step(inputs):
        step.found = Programs(stage, spec_of(inputs), (), None, first=False).activations

    step.get_concrete_function(inputs)
    return step.found


class Standardized(layers.Dense):
    """Computes with a function of its weights."""

    def call(self, inputs):
        kernel = tf.math.l2_normalize(tf.tanh(self.kernel), axis=0)
        return inputs @ kernel + self.bias


def test_weights_and_what_follows_from_them_alone_are_not_kept():
    inputs = draw(3, 5)
    # Of these, the inputs are all that is needed; and they are given anyway.
    assert activations(layers.Dense(7), inputs=inputs) == []
    assert activations(Standardized(7), inputs=inputs) == []
    kept = activations(Standardized(7), layers.Activation("tanh"), Standardized(2), inputs=inputs)
    assert kept == [tf.TensorSpec([3, 7])]


def test_what_is_kept_of_batch_norm_and_dropout():
    blocks = [layers.Conv2D(4, 1), BatchNormalization(), Dropout(0.5), layers.ReLU()]
    kept = activations(*blocks, inputs=draw(3, 8, 8, 2))
    # The norm's inputs and the ReLU's outputs; noise is made of its seed again.
    assert [own for own in kept if own.shape.rank == 4] == [tf.TensorSpec([3, 8, 8, 4])] * 2
    # Besides, the norm's statistics, and what its kernel reserves.
    assert len(kept) == 5


def test_the_weights_are_those_at_the_beginning():
    """They are read once, whatever happens to them later."""
    dense = Standardized(2)
    stage = Stage([dense], "/CPU:0")
    inputs, upstream = draw(4, 3), draw(4, 2, seed=1)
    stage(inputs)
    aims = expected(stage, inputs, upstream=[upstream])

    @tf.function(autograph=False)
    def step():
        programs = Programs(stage, spec_of(inputs), (), None, first=False)
        dense.kernel.assign(tf.zeros([3, 2]))
        sums = programs.zeros()
        outputs, kept, sums = programs.forward(NUMBER, SHARE, inputs, (), sums, keep=True)
        _, back, _ = programs.backward(NUMBER, SHARE, inputs, (), [upstream], kept, sums)
        return outputs.values, back

    assert_close(step(), aims[:2])


class Moody(layers.Layer):
    """Has no ``training`` argument, as Keras' own layers of that kind; and flow of control."""

    def build(self, input_shape):
        self.weight = self.add_weight(name="weight", shape=[4], initializer="ones")

    def call(self, inputs):
        inputs = tf.cond(tf.reduce_sum(inputs) > 0, lambda: inputs * self.weight, lambda: inputs)
        return tf.while_loop(
            lambda number, _: number < 3,
            lambda number, values: (number + 1, tf.sin(values) + self.weight),
            (0, inputs),
        )[1]


@pytest.mark.long
@pytest.mark.parametrize("keep", [True, False])
def test_flow_of_control(keep):
    stage = Stage([layers.Dense(4), Moody()], "/CPU:0")
    for sign in (1.0, -1.0):
        inputs = sign * tf.abs(draw(4, 3))
        stage(inputs)
        stage.blocks[0].set_weights([np.ones((3, 4)), np.zeros(4)])
        options = {"upstream": [draw(4, 4)]}
        outputs, back, gradients, _ = taken(stage, inputs, keep=keep, **options)
        assert_close((outputs, back, gradients), expected(stage, inputs, **options)[:3])


@tf.custom_gradient
def rounded(values):
    """Has another gradient than TensorFlow would take."""
    return tf.round(values), lambda upstream: 3 * upstream * values


class Recomputed(layers.Dense):
    """Keeps no activations in any case."""

    def call(self, inputs):
        return tf.recompute_grad(lambda own: tf.sin(tf.matmul(own, self.kernel)))(inputs)


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_of_the_blocks_own(keep):
    blocks = [layers.Dense(4), layers.Lambda(rounded), Recomputed(5, use_bias=False)]
    stage = Stage(blocks, "/CPU:0")
    inputs, upstream = draw(5, 3), [draw(5, 5, seed=1)]
    found = taken(stage, inputs, keep=keep, upstream=upstream)
    assert_close(found[:3], expected(stage, inputs, upstream=upstream)[:3])


@pytest.mark.parametrize("keep", [True, False])
def test_embeddings(keep):
    """Gradients of rows, and inputs that have none."""
    stage = Stage([layers.Embedding(7, 3), layers.Flatten(), layers.Dense(2)], "/CPU:0")
    inputs, options = tf.constant([[1, 2], [2, 5], [0, 2]]), {"targets": [draw(3, 2)]}
    _, back, gradients, _ = taken(stage, inputs, keep=keep, loss=squares, **options, times=2)
    aims = expected(stage, inputs, loss=squares, **options)[2]
    assert back == []
    assert_close(gradients, [2 * tf.convert_to_tensor(own) for own in aims])
    assert np.abs(gradients[0][2]).max() > 1e-3
    np.testing.assert_array_equal(gradients[0][6], np.zeros(3))


@pytest.mark.parametrize("keep", [True, False])
def test_integers_pass_through_a_stage(keep):
    class Both(layers.Layer):
        def call(self, inputs):
            values, numbers = inputs
            return numbers + 1, 2 * values

    stage = Stage([Both()], "/CPU:0")
    inputs, upstream = (draw(4, 3), tf.range(4)), [draw(4, 3, seed=1)]
    outputs, back, gradients, _ = taken(stage, inputs, keep=keep, upstream=upstream)
    assert_close(outputs, (tf.range(1, 5), 2 * inputs[0]))
    assert_close((back, gradients), ([2 * upstream[0]], []))


class Unused(layers.Dense):
    """Has weights that the loss does not depend on, and lets no gradient through."""

    def call(self, inputs):
        return tf.stop_gradient(inputs) + tf.stop_gradient(self.kernel)[0] * 0 + self.bias


@pytest.mark.parametrize("keep", [True, False])
def test_what_has_no_gradient(keep):
    stage = Stage([layers.Dense(2), Unused(2)], "/CPU:0")
    inputs, upstream = draw(4, 3), draw(4, 2)

    @tf.function(autograph=False)
    def step():
        programs = Programs(stage, spec_of(inputs), (), None, first=False)
        sums = programs.zeros()
        _, kept, sums = programs.forward(NUMBER, SHARE, inputs, (), sums, keep=keep)
        _, back, sums = programs.backward(NUMBER, SHARE, inputs, (), [upstream], kept, sums)
        gradients, step.reached = programs.gradients(sums, [True])
        step.missing = [own is None for own in gradients]
        return back, gradients[-1]

    stage(inputs)
    back, bias = step()
    # Kernel and bias of the first, and the kernel of the second.
    assert step.missing == [True, True, True, False]
    assert_close(bias, np.sum(upstream, axis=0))
    # The stage before needs one all the same.
    assert_close(back, [np.zeros((4, 3))])
    assert step.reached == [False]


class Heads(layers.Layer):
    """Two outputs that depend on weights of their own, and a penalty on the second's."""

    def build(self, input_shape):
        self.first = layers.Dense(2, use_bias=False)
        self.second = layers.Dense(2, kernel_regularizer="l2")

    def call(self, inputs):
        return self.first(inputs["a"]), self.second(inputs["b"])


def test_gradients_that_no_output_passes_on_are_none():
    stage, inputs = Stage([Heads()], "/CPU:0"), {"a": draw(4, 3), "b": draw(4, 3)}
    stage(inputs)
    found = {}

    @tf.function(autograph=False)
    def step():
        programs = Programs(stage, tf.nest.map_structure(spec_of, inputs), (), None, first=False)
        for reached in ((True, True), (True, False), (False, True), (False, False)):
            gradients, depends = programs.gradients(programs.zeros(), reached)
            found[reached] = [own is not None for own in gradients], depends

    step()
    # The first kernel; the second kernel, which is regularized, and its bias.
    assert found == {
        (True, True): ([True, True, True], [True, True]),
        (True, False): ([True, True, False], [True, False]),
        (False, True): ([False, True, True], [False, True]),
        (False, False): ([False, True, False], [False, False]),
    }


@pytest.mark.parametrize("keep", [True, False])
def test_complex_numbers_between_stages(keep):
    """Both ends of a stage, whose gradients Keras' tape computes, too."""
    square = layers.Lambda(lambda x: tf.square(tf.signal.fft(x)))
    stage, inputs = Stage([square], "/CPU:0"), tf.complex(draw(4, 3), draw(4, 3, seed=1))
    upstream = [tf.complex(draw(4, 3, seed=2), draw(4, 3, seed=3))]
    found = taken(stage, inputs, keep=keep, upstream=upstream)
    assert_close(found[:3], expected(stage, inputs, upstream=upstream)[:3])


@pytest.mark.parametrize("keep", [True, False])
def test_mixed_bfloat16(keep):
    norm = layers.BatchNormalization(dtype="mixed_bfloat16")
    dense = layers.Dense(
        5, dtype="mixed_bfloat16", kernel_regularizer="l2", activity_regularizer="l2"
    )
    stage = Stage([norm, layers.Dense(4, "tanh", dtype="mixed_bfloat16"), dense], "/CPU:0")
    inputs, upstream = tf.cast(draw(8, 3), tf.bfloat16), [tf.cast(draw(8, 5), tf.bfloat16)]
    outputs, (back,), gradients, sums = taken(stage, inputs, keep=keep, upstream=upstream)
    aims, (aim,), others, penalty = expected(stage, inputs, upstream=upstream)
    assert outputs.dtype == back.dtype == tf.bfloat16
    assert {own.dtype for own in (*gradients, *sums.moments, sums.penalty)} == {tf.float32}
    for own, other in zip((outputs, back, *gradients), (aims, aim, *others)):
        np.testing.assert_allclose(
            tf.cast(own, tf.float32), tf.cast(other, tf.float32), rtol=0.02, atol=0.02
        )
    assert_close(sums.penalty, penalty, rtol=0.01)


def called(function):
    """A layer."""
    return layers.Lambda(function, name="guilty")


def counting():
    class Counting(layers.Layer):
        def build(self, input_shape):
            self.count = self.add_weight(name="count", shape=[3], trainable=False)

        def call(self, inputs):
            self.count.value[0].assign(2.0) if self.partly else self.count.assign_add([1.0] * 3)
            return inputs

    return Counting(name="guilty")


def counting_partly():
    layer = counting()
    layer.partly = True
    return layer


def counting_all():
    layer = counting()
    layer.partly = False
    return layer


def drawing_from_a_generator():
    generator = tf.random.Generator.from_seed(1)
    return called(lambda x: x * tf.cast(generator.binomial([1], [9.0], [0.5]), x.dtype))


PYTHON = "calls Python.*use TensorFlow operations in place of tf.py_function"
RANDOM = "draws random numbers.*use keras.random with a SeedGenerator.*or rematerialize='never'"
CHANGE = "changes a variable.*compute the value from the inputs"
REFUSED = {
    "py_function": (lambda: called(lambda x: tf.py_function(np.sin, [x], tf.float32)), PYTHON),
    "numpy_function": (lambda: called(lambda x: tf.numpy_function(np.sin, [x], x.dtype)), PYTHON),
    "Keras' dropout": (lambda: layers.Dropout(0.5, name="guilty"), f"{CHANGE}.*SeedGenerator"),
    "normal": (lambda: called(lambda x: x + tf.random.normal([3])), RANDOM),
    "truncated": (lambda: called(lambda x: x + tf.random.truncated_normal([3])), RANDOM),
    "shuffle": (lambda: called(lambda x: tf.random.shuffle(x)), RANDOM),
    "categorical": (
        lambda: called(lambda x: x + tf.cast(tf.random.categorical(x, 1), tf.float32)),
        RANDOM,
    ),
    "generator": (drawing_from_a_generator, RANDOM),
    "assign": (counting_all, CHANGE),
    "assign a part": (counting_partly, CHANGE),
}


class Inside(layers.Layer):
    """Calls a layer in a function or a branch."""

    def __init__(self, layer, how):
        super().__init__(name="outer")
        self.layer = layer
        self.function = tf.function(lambda x: self.layer(x, training=True))
        self.how = how

    def call(self, inputs, training=None):
        if not self.layer.built:
            self.layer.build(inputs.shape)
        if not training:
            return inputs
        if self.how == "function":
            return self.function(inputs)
        return tf.cond(
            tf.reduce_sum(inputs) > 0,
            lambda: tf.ensure_shape(self.layer(inputs, training=True), inputs.shape),
            lambda: inputs,
        )


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "outright") for name in REFUSED),
        *((name, how) for name in ("normal", "assign a part") for how in ("function", "branch")),
        *(
            pytest.param(name, how, marks=pytest.mark.long)
            for name in REFUSED
            for how in ("function", "branch")
            if name not in ("normal", "assign a part")
        ),
    ],
)
def test_refusals(name, how):
    make, told = REFUSED[name]
    guilty = make()
    block = guilty if how == "outright" else Inside(guilty, how)
    stage = Stage([layers.Dense(3, name="innocent"), block], "/CPU:0")
    told = rf"{block.name}\w*/.*, in the stage innocent -> {block.name}, {told}"
    with pytest.raises(UserError, match=told):
        taken(stage, draw(4, 3), keep=False, upstream=[draw(4, 3)])


@pytest.mark.parametrize("how", ["outright", "function", "branch"])
def test_random_numbers_are_stored_wherever_they_are_drawn(how):
    """Of x * (mask * w) with w = 1: its gradient is the sum of the outputs, if x is 1."""

    class Mask(layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(name="scale", shape=[50], initializer="ones")

        def call(self, inputs):
            def draws():
                return tf.random.uniform([50]) - 0.5

            if how == "function":
                draws = tf.function(draws)
            if how == "branch":
                drawn = tf.cond(tf.reduce_sum(self.scale) > 0, draws, lambda: tf.ones([50]))
            else:
                drawn = draws()
            return inputs * (drawn * self.scale)

    stage, inputs = Stage([Mask()], "/CPU:0"), tf.ones([1, 50])
    stage(inputs)

    @tf.function(autograph=False)
    def step():
        programs = Programs(stage, spec_of(inputs), (), None, first=True, recomputes=False)
        sums = programs.zeros()
        outputs, kept, sums = programs.forward(NUMBER, SHARE, inputs, (), sums, keep=True)
        _, _, sums = programs.backward(NUMBER, SHARE, inputs, (), [inputs], kept, sums)
        return outputs.values, programs.gradients(sums, [True])[0]

    outputs, (gradient,) = step()
    assert_close(gradient, outputs[0])


def test_stateless_random_numbers_may_be_drawn():
    gamma = called(lambda x: tf.random.stateless_gamma([4, 3], [1, 2], tf.nn.softplus(x)))
    stage = Stage([layers.Dense(3), gamma], "/CPU:0")
    inputs, upstream = draw(4, 3), [draw(4, 3)]
    found = taken(stage, inputs, keep=False, upstream=upstream)
    assert_close(found[:3], expected(stage, inputs, upstream=upstream)[:3], rtol=1e-4, atol=1e-5)


class Told(layers.Layer):
    """In training, checks its inputs and writes a line."""

    def __init__(self, file):
        super().__init__()
        self.file = f"file://{file}"

    def call(self, inputs, training=None):
        if training:
            tf.debugging.assert_less(inputs, 9.0, message="too large")
            tf.cond(
                tf.reduce_max(inputs) > -9,
                lambda: tf.print("computed", output_stream=self.file),
                tf.no_op,
            )
        return 2 * inputs


@pytest.mark.parametrize("loss", [None, squares])
@pytest.mark.parametrize("keep", [True, False])
def test_checks_and_prints_are_run_once_a_micro_batch(keep, loss, tmp_path):
    stage = Stage([Told(tmp_path / "lines"), layers.Dense(3)], "/CPU:0")
    inputs = draw(4, 3)
    upstream = [] if loss else [draw(4, 3, seed=1)]
    taken(stage, inputs, keep=keep, loss=loss, upstream=upstream, times=3)
    assert (tmp_path / "lines").read_text() == "computed\n" * 3
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        taken(stage, inputs + 9, keep=keep, loss=loss, upstream=upstream)


def test_variables_behind_a_loss():
    used, cut, fixed = (tf.Variable(2.0), tf.Variable(3.0), tf.Variable(4.0, trainable=False))
    with tf.GradientTape() as tape:
        loss = used**2 + tf.stop_gradient(cut) + fixed
    assert [variable.ref() for variable in variables_behind(loss, tape)] == [used.ref()]
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    assert variables_behind(loss, tape) == []
