"""Networks cut into blocks, which must be the same network."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.models.blocks import clone, cut
from imagenet_fast.models.shape_only import shape_only

layers = keras.layers


def names(blocks):
    return [block.name for block in blocks]


def in_resnet(depths):
    stem = ["stem_conv_pad", "stem_conv", "stem_bn", "stem_relu", "stem_pool_pad", "stem_pool"]
    body = [
        f"stage{stage}_block{block}_{end}"
        for stage, depth in enumerate(depths, start=1)
        for block in range(1, depth + 1)
        for end in ("add", "relu")
    ]
    return [*stem, *body, "global_pool", "logits"]


AMOEBANET = [
    *("stem1", "stem2", "stem3", "stage1_cell1", "stage2_reduction", "stage2_cell1"),
    *("stage3_reduction", "stage3_cell1", "last_relu", "global_pool", "logits"),
]
IN_ALEXNET = [
    "conv1_pad",
    *("conv1", "bn1", "relu1", "pool1", "conv2", "bn2", "relu2", "pool2", "conv3", "bn3", "relu3"),
    *("conv4", "bn4", "relu4", "conv5", "relu5", "pool5", "bn5", "flatten"),
    *("fc6", "relu6", "dropout6", "fc7", "relu7", "dropout7", "logits"),
]
# Of its residual blocks, the ends.
IN_RESNET9 = [
    *("prep_conv", "prep_bn", "prep_relu"),
    *("layer1_conv", "layer1_bn", "layer1_relu", "layer1_pool", "layer1_add"),
    *("layer2_conv", "layer2_bn", "layer2_relu", "layer2_pool"),
    *("layer3_conv", "layer3_bn", "layer3_relu", "layer3_pool", "layer3_add"),
    *("global_pool", "logits", "scale"),
]


@pytest.mark.parametrize(
    ("name", "size", "options", "expected"),
    [
        pytest.param("resnet18", 64, {}, in_resnet((2, 2, 2, 2)), marks=pytest.mark.long),
        pytest.param("resnet101", 64, {}, in_resnet((3, 4, 23, 3)), marks=pytest.mark.long),
        ("alexnet_bn", 224, {}, IN_ALEXNET),
        ("resnet9", 32, {}, IN_RESNET9),
        pytest.param(
            *("amoebanet_d", 64, {"normal_cells": 3, "cell_filters": 32}, AMOEBANET),
            marks=pytest.mark.long,
        ),
    ],
)
def test_blocks_of_networks(name, size, options, expected):
    with shape_only():
        model = models.build(name, 10, (size, size, 3), **options)
        blocks = cut(model)
    assert names(blocks) == expected
    own = [id(variable) for block in blocks for variable in block.variables]
    assert len(own) == len(set(own))
    assert set(own) == {id(variable) for variable in model.variables}


def run(call, variables, images):
    """Outputs in training, and gradients."""
    with tf.GradientTape() as tape:
        tape.watch(images)
        outputs = call(images)
        loss = tf.reduce_sum(tf.square(outputs))
    return outputs, tape.gradient(loss, [images, *variables])


def through(blocks):
    def call(values):
        for block in blocks:
            values = block(values, training=True)
        return values

    return call


def check(model, *shape):
    """That the blocks compute what the model does, with the same weights.

    Returns:
      The blocks.
    """
    blocks = cut(model)
    images = tf.constant(np.random.default_rng(0).normal(size=shape).astype("float32"))
    averages = model.get_weights()
    outputs, gradients = run(lambda own: model(own, training=True), model.trainable_weights, images)
    moved = model.get_weights()
    model.set_weights(averages)
    others, differences = run(through(blocks), model.trainable_weights, images)
    np.testing.assert_allclose(others, outputs, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, differences):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())
    for one, other in zip(model.get_weights(), moved):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.abs(gradients[0]).max() > 0
    own = [variable for block in blocks for variable in block.trainable_weights]
    assert {id(variable) for variable in own} == {
        id(variable) for variable in model.trainable_weights
    }
    assert len(own) == len(model.trainable_weights)
    return blocks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet8", {}),
        ("resnet9", {"width": 8}),
        pytest.param("amoebanet_d", {"normal_cells": 3, "cell_filters": 8}, marks=pytest.mark.long),
    ],
)
def test_blocks_of_networks_are_the_network(name, options):
    keras.utils.set_random_seed(0)
    check(models.build(name, 4, (32, 32, 3), **options), 2, 32, 32, 3)


@pytest.mark.long
def test_a_layer_with_several_outputs_gives_the_next_block_a_list():
    """As the cells of AmoebaNet."""
    model = models.build("amoebanet_d", 4, (32, 32, 3), normal_cells=3, cell_filters=8)
    blocks = {block.name: block for block in cut(model)}
    assert len(blocks["stem2"].inputs) == 1
    assert isinstance(blocks["stem2"].output, list)
    assert len(blocks["stage1_cell1"].inputs) == len(blocks["stage1_cell1"].outputs) == 2


def test_branches_stay_in_one_block():
    inputs = keras.Input([4])
    before = layers.Dense(5, "tanh", name="before")(inputs)
    left = layers.Dense(3, name="left")(before)
    right = layers.Dense(3, name="right")(layers.Dense(2, name="deeper")(before))
    joined = layers.Add(name="joined")([left, right])
    model = keras.Model(inputs, layers.Dense(2, name="after")(joined))
    assert names(check(model, 3, 4)) == ["before", "joined", "after"]


def test_a_skip_over_the_whole_network_leaves_one_block():
    inputs = keras.Input([4])
    deep = layers.Dense(4, name="one")(inputs)
    deep = layers.Dense(4, name="two")(deep)
    model = keras.Model(inputs, layers.Add(name="sum")([inputs, deep]))
    assert names(check(model, 3, 4)) == ["sum"]


def test_operations_in_place_of_layers():
    inputs = keras.Input([4])
    values = layers.Dense(6, name="dense")(inputs)
    values = keras.ops.relu(values) * 2.0 + values[:, :1]
    values = keras.ops.concatenate([values, keras.ops.ones_like(values)], axis=-1)
    model = keras.Model(inputs, layers.Dense(2, name="last")(keras.ops.sin(values)))
    found = names(check(model, 3, 4))
    assert (found[0], found[-1], len(found)) == ("dense", "last", 5)


def test_a_layer_that_is_called_twice_is_in_one_block():
    twice = layers.Dense(4, "tanh", name="twice")
    inputs = keras.Input([4])
    values = layers.Dense(4, name="between")(twice(layers.Dense(4, name="before")(inputs)))
    model = keras.Model(inputs, layers.Dense(2, name="after")(twice(values)))
    assert names(check(model, 3, 4)) == ["before", "twice", "after"]


def test_a_layer_also_called_in_another_layer_is_in_one_block():
    shared = layers.Dense(4, "tanh", name="shared")
    nested = keras.Sequential([keras.Input([4]), shared], name="nested")
    inputs = keras.Input([4])
    values = layers.Dense(4, name="between")(shared(layers.Dense(4, name="before")(inputs)))
    model = keras.Model(inputs, layers.Dense(2, name="after")(nested(values)))
    assert names(check(model, 3, 4)) == ["before", "nested", "after"]


def test_layers_that_share_a_weight_are_in_one_block():
    class Transposed(layers.Layer):
        def __init__(self, dense):
            super().__init__(name="transposed")
            self.kernel = dense.kernel

        def call(self, inputs):
            return tf.matmul(inputs, self.kernel, transpose_b=True)

    inputs = keras.Input([4])
    dense = layers.Dense(3, name="dense")
    values = layers.ReLU(name="between")(dense(inputs))
    model = keras.Model(inputs, layers.ReLU(name="after")(Transposed(dense)(values)))
    assert names(check(model, 3, 4)) == ["transposed", "after"]


def test_two_outputs_of_a_layer_and_one_that_is_not_used():
    class Three(layers.Layer):
        def call(self, inputs):
            return inputs, {"twice": 2 * inputs, "unused": inputs + 1}

    inputs = keras.Input([4])
    once, others = Three(name="three")(layers.Dense(4, name="before")(inputs))
    model = keras.Model(inputs, layers.Dense(2, name="after")(once * others["twice"]))
    blocks = check(model, 3, 4)
    assert names(blocks)[:2] == ["before", "three"]
    assert len(blocks[1].outputs) == 2


def test_no_cut_while_an_earlier_output_is_needed():
    class Two(layers.Layer):
        def call(self, inputs):
            return inputs, 2 * inputs

    inputs = keras.Input([4])
    before = layers.Dense(4, name="before")(inputs)
    once, twice = Two(name="two")(before)
    model = keras.Model(inputs, layers.Add(name="sum")([before, once, twice]))
    assert names(check(model, 3, 4)) == ["before", "sum"]


def test_a_nested_model_is_one_layer():
    nested = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(5)], name="nested")
    inputs = keras.Input([4])
    model = keras.Model(inputs, layers.Dense(2, name="after")(nested(inputs)))
    assert names(check(model, 3, 4)) == ["nested", "after"]


def test_a_sequential_model():
    model = keras.Sequential(
        [layers.Dense(3, name="one"), layers.BatchNormalization(name="two"), layers.ReLU(name="x")]
    )
    with pytest.raises(UserError, match=r"a Sequential cannot be cut.*with a keras.Input"):
        cut(model)
    model.build([None, 4])
    assert names(check(model, 3, 4)) == ["one", "two", "x"]


def test_arguments_of_calls_are_kept():
    inputs = keras.Input([6, 4])
    norm = layers.BatchNormalization(name="frozen")(inputs, training=False)
    made, *states = layers.LSTM(3, return_sequences=True, return_state=True, name="states")(norm)
    last = layers.LSTM(3, name="last")(made, initial_state=states)
    model = keras.Model(inputs, layers.Dense(2, name="after")(last))
    assert names(check(model, 3, 6, 4)) == ["frozen", "states", "last", "after"]


def test_a_mask_is_used_in_the_block_that_makes_it():
    inputs = keras.Input([5], dtype="int32")
    values = layers.Embedding(9, 3, mask_zero=True, name="rows")(inputs)
    values = layers.GlobalAveragePooling1D(name="pool")(layers.Dense(3, name="dense")(values))
    model = keras.Model(inputs, layers.Dense(2, name="after")(values))
    blocks = cut(model)
    assert names(blocks) == ["pool", "after"]
    numbers = tf.constant([[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]])
    np.testing.assert_allclose(through(blocks)(numbers), model(numbers), rtol=1e-6)


class ToRagged(layers.Layer):
    def call(self, inputs):
        return tf.RaggedTensor.from_tensor(inputs, padding=0.0)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((None, None), inputs.dtype, ragged=True)


def test_a_tensor_of_another_kind_is_used_in_the_block_that_makes_it():
    inputs = keras.Input([5])
    values = layers.Dense(5, "relu", name="before")(inputs)
    ragged = ToRagged(name="r")(values)
    to_dense = layers.Lambda(lambda x: x.to_tensor(shape=[None, 5]), (5,), name="dense")
    dense = to_dense(ragged)
    model = keras.Model(inputs, layers.Dense(2, name="after")(dense))
    assert names(check(model, 3, 5)) == ["before", "dense", "after"]


def test_blocks_can_be_cut_from_blocks():
    inputs = keras.Input([4])
    values = layers.Dense(3, name="two")(layers.Dense(2, name="one")(inputs))
    model = keras.Model(inputs, layers.Add(name="sum")([values, values]))
    assert [names(cut(block)) for block in cut(model)] == [["one"], ["two"], ["sum"]]


def subclassed():
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    return Own()


def of_two_inputs():
    one, two = keras.Input([4]), keras.Input([4])
    return keras.Model([one, two], layers.Add()([one, two]), name="pair")


def with_a_call_of_its_own():
    class Own(keras.Model):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs, training=training)

    inputs = keras.Input([4])
    return Own(inputs, layers.Dense(2)(inputs))


def of_two_outputs():
    inputs = keras.Input([4])
    return keras.Model(inputs, [layers.ReLU()(inputs), layers.Dense(2)(inputs)], name="pair")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (subclassed, "a Own cannot be cut into blocks.*write the blocks yourself"),
        (with_a_call_of_its_own, "a Own cannot be cut.*without a call of its own"),
        (lambda: layers.Dense(3), "a Dense cannot be cut into blocks"),
        (of_two_inputs, "model 'pair' has 2 inputs and 1 outputs"),
        (of_two_outputs, "model 'pair' has 1 inputs and 2 outputs"),
    ],
)
def test_models_that_cannot_be_cut(make, told):
    with pytest.raises(UserError, match=told):
        cut(make())


def test_names_of_inputs_and_outputs_are_kept():
    inputs = {"image": keras.Input([4])}
    model = keras.Model(inputs, {"logits": layers.Dense(2)(layers.Dense(3)(inputs["image"]))})
    values = {"image": np.ones([1, 4], "float32")}
    expected = model(values)
    for block in cut(model):
        values = block(values)
    assert values.keys() == {"logits"}
    np.testing.assert_array_equal(values["logits"], expected["logits"])


def nested():
    """A model in a model, and its two layers."""
    inner = keras.Sequential([keras.Input([4]), layers.Dense(4), layers.BatchNormalization()])
    inputs = keras.Input([4])
    return keras.Model(inputs, layers.Dense(2)(inner(inputs))), *inner.layers


@pytest.mark.parametrize("outer", [True, False])
def test_a_clone_trains_the_same_layers(outer):
    model, dense, norm = nested()
    model.get_layer(index=1).trainable = outer
    dense.trainable, norm.trainable = not outer, outer
    copy = clone(model)
    assert len(copy.trainable_variables) == len(model.trainable_variables) == 4
    flags = [[own.trainable for own in one._flatten_layers()] for one in (model, copy)]
    assert flags[0] == flags[1]


def test_blocks_of_a_frozen_model_are_frozen():
    model, *_ = nested()
    model.trainable = False
    model.layers[-1].trainable = True
    assert model.trainable_variables == []
    assert [block.trainable_variables for block in cut(model)] == [[], []]
