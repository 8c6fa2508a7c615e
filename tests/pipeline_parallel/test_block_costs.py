"""Costs of blocks, against published counts and what pipelines keep of whole stages."""

import functools
import gc
import weakref

import keras
import pytest
import tensorflow as tf

from imagenet_fast import UserError, models
from imagenet_fast.models.amoebanet import amoebanet_blocks
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.pipeline_parallel import profile
from imagenet_fast.pipeline_parallel.profile import block_kind, estimate, measure
from imagenet_fast.pipeline_parallel.programs import Programs
from imagenet_fast.pipeline_parallel.simulation import BlockCost
from imagenet_fast.pipeline_parallel.stage import Stage


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec((None, *shape), dtype)


def network(name, size, **options):
    with shape_only():
        return cut(models.build(name, 10, (size, size, 3), **options))


def together(costs):
    return functools.reduce(BlockCost.followed_by, costs)


class Scale(keras.layers.Layer):
    """Not registered with Keras; its factor does not learn."""

    def build(self, input_shape):
        self.factor = self.add_weight(name="factor", shape=[], dtype="float32", trainable=False)
        super().build(input_shape)

    def call(self, inputs):
        return inputs * self.factor


def test_a_dense_layer():
    blocks = [keras.layers.Dense(5), Scale(), keras.layers.Dense(4, use_bias=False)]
    first, scale, last = estimate(blocks, spec(3), 2)
    assert [own.name for own in (first, scale, last)] == [own.name for own in blocks]
    assert first.forward == 2 * (2 * 3 * 5) + 10  # and the bias
    # Of weights alone; the first block's inputs need no gradients. Of the bias, a sum.
    assert first.backward == 2 * (2 * 3 * 5) + 10
    assert (first.parameters, first.parameter_bytes, first.other_bytes) == (20, 80, 0)
    assert (first.input_bytes, first.needed_input_bytes, first.output_bytes) == (24, 24, 40)
    assert first.activation_bytes == 0
    assert (scale.parameters, scale.other_bytes, scale.forward) == (0, 4, 10)
    # Multiplied by a weight that does not learn, they are not needed.
    assert (scale.input_bytes, scale.needed_input_bytes) == (40, 0)
    assert last.backward == 2 * last.forward == 2 * 2 * (2 * 5 * 4)
    assert not any(own.built for own in blocks)


@pytest.mark.long
def test_multiplications_of_resnet_50():
    """He et al. 2015, table 1: 3.8e9 multiplications and additions, the stride on the 1x1."""
    options = {"zero_gamma": False, "stride_on_1x1": True}
    with shape_only():
        blocks = cut(models.build("resnet50", 1000, (224, 224, 3), **options))
    costs = estimate(blocks, spec(224, 224, 3), 1)
    total = together(costs)
    assert total.forward / 2 == pytest.approx(3.8e9, rel=0.03)
    assert total.backward == pytest.approx(2 * total.forward, rel=0.03)
    assert total.parameters == 25_557_032
    assert total.other_bytes == 4 * 2 * 26_560  # of 26,560 channels, two moving averages


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        pytest.param(
            "amoebanet_d", 32, {"normal_cells": 3, "cell_filters": 8}, marks=pytest.mark.long
        ),
        ("resnet8", 32, {}),
        pytest.param("resnet9", 32, {"width": 4}, marks=pytest.mark.long),
        pytest.param("alexnet_bn", 67, {}, marks=pytest.mark.long),
    ],
)
def test_activations_are_what_the_pipeline_keeps_of_a_stage(name, size, options):
    blocks = network(name, size, **options)
    specs = tf.TensorSpec((4, size, size, 3), tf.float32)
    half = len(blocks) // 2
    costs = estimate(blocks, spec(size, size, 3), 4)
    for part, own in ((blocks[:half], costs[:half]), (blocks[half:], costs[half:])):
        kept = Programs(Stage(part, "CPU:0"), specs, (), None, first=part[0] is blocks[0])
        whole = [own for own in kept.activations if own.shape.is_fully_defined()]
        size_of_all = sum(own.shape.num_elements() * own.dtype.size for own in whole)
        assert together(own).activation_bytes == size_of_all > 0
        specs = kept.outputs.values


@pytest.mark.long
def test_a_published_network():
    """torchgpipe's AmoebaNet-D (3, 64) for 10 classes has 1,541,066 parameters."""
    blocks = amoebanet_blocks("d", 3, 64, 10)  # not built
    costs = estimate(blocks, spec(32, 32, 3), 2)
    assert together(costs).parameters == 1_541_066
    # stem2 of 8 x 8 with 3 x 32 channels returns its input of 16 x 16 with 16, too.
    assert costs[1].output_bytes == 4 * 2 * (8 * 8 * 96 + 16 * 16 * 16)


def test_equal_blocks_are_looked_at_once(monkeypatch):
    seen = []
    count = profile._count

    def counted(block, *rest, **options):
        seen.append(block.name)
        return count(block, *rest, **options)

    monkeypatch.setattr(profile, "_count", counted)
    x = images = keras.Input((8, 8, 3))
    for number in range(4):
        x = y = keras.layers.Conv2D(3, 3, padding="same", name=f"conv{number}")(x)
        y = keras.layers.Activation("relu", name=f"other{number}")(y)
        x = keras.layers.Add(name=f"sum{number}")([x, y])
    blocks = cut(keras.Model(images, keras.layers.Conv2D(3, 5, name="last")(x)))
    costs = estimate(blocks, spec(8, 8, 3), 2)
    assert [own.name for own in costs] == [own.name for own in blocks]
    # Of the first one's inputs no gradients are needed.
    assert seen == ["conv0", "sum0", "conv1", "last"]
    named = {own.name: own for own in costs}
    assert named["conv1"] == named["conv3"]._replace(name="conv1")
    assert named["conv0"].backward < named["conv1"].backward


def test_sixteen_bits_take_half():
    whole, half = (
        estimate(
            [
                keras.layers.Conv2D(4, 3, dtype=keras.mixed_precision.Policy(policy), name="conv"),
                keras.layers.Activation("tanh", dtype=keras.mixed_precision.Policy(policy)),
            ],
            spec(8, 8, 3),
            2,
        )
        for policy in ("float32", "mixed_bfloat16")
    )
    assert half[1].output_bytes * 2 == whole[1].output_bytes
    assert half[1].input_bytes * 2 == whole[1].input_bytes
    assert half[0].parameter_bytes == whole[0].parameter_bytes
    assert half[0].forward == whole[0].forward


def test_takes_no_memory():
    """Of weights of 256 MiB."""
    made = []

    def creator(make, **options):
        variable = make(**options)
        made.append(weakref.ref(variable))
        return variable

    with tf.variable_creator_scope(creator):
        costs = estimate([keras.layers.Dense(2**13, use_bias=False)], spec(2**13), 1)
    assert costs[0].parameter_bytes == 2**28
    gc.collect()
    assert [own() for own in made] == [None]


def test_what_cannot_be_in_a_pipeline():
    class Calls(keras.layers.Layer):
        def call(self, inputs):
            return tf.ensure_shape(tf.py_function(lambda x: x, [inputs], tf.float32), inputs.shape)

    with pytest.raises(UserError, match="calls Python"):
        estimate([Calls()], spec(3), 2)


@pytest.mark.long
def test_measured():
    images = keras.Input((16, 16, 3))
    with shape_only():
        model = keras.Model(images, Scale(name="own")(keras.layers.Conv2D(4, 3)(images)))
        blocks = [*cut(model), keras.layers.Conv2D(64, 5, padding="same", name="large")]
    alive = []

    def creator(make, **options):
        variable = make(**options)
        alive.append(weakref.ref(variable.handle))
        return variable

    with tf.variable_creator_scope(creator):
        costs = measure(blocks, spec(16, 16, 3), 8, "/device:CPU:0", repeats=3)
    counted = estimate(blocks, spec(16, 16, 3), 8)
    for own, other in zip(costs, counted):
        assert 0 < own.forward < 10
        assert 0 < own.backward < 10
        assert own._replace(forward=other.forward, backward=other.backward) == other
    assert costs[2].work > costs[1].work
    # Weights are freed again.
    assert alive
    assert [own() for own in alive] == [None] * len(alive)


def test_names_do_not_make_another_kind():
    def network(*names, filters=4):
        first, second, third = names
        x = images = keras.Input((8, 8, 3), name=first)
        x = keras.layers.Conv2D(filters, 3, name=second)(x)
        return keras.Model(images, keras.layers.Activation("relu", name=third)(x))

    specs = tf.TensorSpec((None, 8, 8, 3))
    kind = block_kind(network("a", "b", "c"), specs)
    assert block_kind(network("x", "relu", "z"), specs) != kind  # a name that says more
    assert block_kind(network("x", "y", "z"), specs) == kind
    assert block_kind(network("a", "b", "c", filters=5), specs) != kind
    assert block_kind(network("a", "b", "c"), tf.TensorSpec((2, 8, 8, 3))) != kind
