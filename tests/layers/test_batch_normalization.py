"""Batch norm by the fused kernel, beside Keras' layer and NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.base.keras_2 import KERAS_2, tensorflow_variables
from imagenet_fast.layers import (
    BatchNormalization,
    GhostBatchNormalization,
    GroupedBatchNormalization,
)

IMAGES = (6, 4, 3, 5)
RANKS = [(6, 5), (6, 4, 5), (4, 3, 3, 2, 5)]
of_keras_3 = pytest.mark.skipif(KERAS_2, reason="of Keras 3, whose layer has no fused kernel")


def batches(shape, count=3):
    generator = np.random.default_rng(0)
    return [generator.normal(5, 3, shape).astype("float32") for _ in range(count)]


def run(layer, shape, training=True, jit=False, **inputs):
    """Returns outputs, gradients and moving averages after some steps."""
    layer.build((None, *shape[1:]))
    generator = np.random.default_rng(1)
    layer.set_weights([generator.uniform(0.5, 2, w.shape) for w in layer.get_weights()])
    upstream = generator.normal(size=shape).astype("float32")
    weights = tensorflow_variables([w for w in (layer.gamma, layer.beta) if w is not None])

    @tf.function(jit_compile=jit)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            outputs = layer(x, training=training, **inputs)
            loss = tf.reduce_sum(tf.cast(outputs, "float32") * upstream)
        return outputs, tape.gradient(loss, [x, *weights])

    for batch in batches(shape):
        outputs, gradients = step(tf.cast(batch, layer.compute_dtype))
    return [outputs, *gradients, layer.moving_mean, layer.moving_variance]


def assert_equal_keras(shape, tolerance=2e-5, trainable=True, of_call=None, **options):
    layers = BatchNormalization(**options), keras.layers.BatchNormalization(**options)
    results = []
    for layer in layers:
        layer.trainable = trainable
        results.append(run(layer, shape, **(of_call or {})))
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        scale = np.abs(np.asarray(theirs, "float64")).max()
        np.testing.assert_allclose(
            np.asarray(ours, "float64"), np.asarray(theirs, "float64"), atol=tolerance * scale
        )


# --- Beside Keras' layer


@of_keras_3
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        ("float32", 2e-5),
        ("mixed_float16", 2e-3),
        ("mixed_bfloat16", 1e-2),
        # Their weights are not float32, which the kernel needs.
        ("float64", 1e-12),
        ("float16", 2e-3),
        ("bfloat16", 1e-2),
    ],
)
def test_training(policy, tolerance, jit):
    assert_equal_keras(IMAGES, tolerance, dtype=policy, of_call={"jit": jit})


@of_keras_3
@pytest.mark.parametrize(
    "options",
    [
        {"scale": False},
        {"center": False},
        {"momentum": 0.5, "epsilon": 0.1},
        {"axis": 1},
        {"axis": -2},
        {"synchronized": True},
        {"trainable": False},
        {"of_call": {"training": False}},
        {"of_call": {"training": False, "jit": True}},
        {"of_call": {"mask": tf.constant(np.random.default_rng(2).random(IMAGES[:3]) < 0.5)}},
    ],
    ids=str,
)
def test_options(options):
    assert_equal_keras(IMAGES, **options)


@of_keras_3
@pytest.mark.parametrize("shape", [*RANKS, (1, 1, 1, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_other_shapes(shape, training):
    assert_equal_keras(shape, of_call={"training": training})


@of_keras_3
@pytest.mark.parametrize(
    ("options", "kernels"),
    [({}, 1), ({"dtype": "mixed_float16"}, 1), ({"axis": 1}, 0), ({"synchronized": True}, 0)],
)
def test_one_kernel_normalizes(options, kernels):
    layer = BatchNormalization(**options)
    layer.build(IMAGES)
    graph = tf.function(lambda x: layer(x, training=True)).get_concrete_function(
        tf.zeros(IMAGES, layer.compute_dtype)
    )
    names = [op.type for op in graph.graph.get_operations()]
    assert names.count("FusedBatchNormV3") == kernels


@of_keras_3
def test_a_replica_without_images_keeps_its_averages():
    layer = BatchNormalization()
    layer.build(IMAGES)
    before = layer.get_weights()
    step = tf.function(lambda x: layer(x, training=True))
    step.get_concrete_function(tf.TensorSpec([None, *IMAGES[1:]]))(tf.zeros([0, *IMAGES[1:]]))
    np.testing.assert_array_equal(layer.get_weights(), before)


# --- The moving average of unbiased variances


@of_keras_3
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [(IMAGES, -1), (IMAGES, 1), *((shape, -1) for shape in RANKS)]
)
def test_unbiased_variance(shape, axis, jit):
    layer = BatchNormalization(axis, unbiased_variance=True, momentum=0.75)
    *_, mean, variance = run(layer, shape, jit=jit)
    axes = tuple(place for place in range(len(shape)) if place != axis % len(shape))
    means, variances = np.random.default_rng(1).uniform(0.5, 2, (4, shape[axis]))[2:]
    for batch in batches(shape):
        means = 0.75 * means + 0.25 * batch.mean(axes)
        variances = 0.75 * variances + 0.25 * batch.var(axes, ddof=1)
    np.testing.assert_allclose(np.asarray(mean), means, rtol=2e-6)
    np.testing.assert_allclose(np.asarray(variance), variances, rtol=2e-6)


@of_keras_3
@pytest.mark.parametrize("shape", [(1, 5), (1, 1, 1, 5)])
def test_the_unbiased_variance_of_one_value_is_0(shape):
    layer = BatchNormalization(unbiased_variance=True, momentum=0.5)
    layer(tf.ones(shape), training=True)
    np.testing.assert_array_equal(np.asarray(layer.moving_variance), [0.5] * 5)


@of_keras_3
@pytest.mark.parametrize("option", ["renorm", "synchronized"])
def test_unbiased_variance_with_other_statistics(option):
    with pytest.raises(UserError, match=f"^unbiased_variance does not work with {option}: leave"):
        BatchNormalization(unbiased_variance=True, **{option: True})


@of_keras_3
def test_unbiased_variance_with_a_mask():
    layer = BatchNormalization(unbiased_variance=True)
    mask = tf.ones([2, 3], bool)
    layer(tf.ones([2, 3, 5]), mask=mask)
    with pytest.raises(UserError, match=r"^unbiased_variance does not work with masks"):
        layer(tf.ones([2, 3, 5]), mask=mask, training=True)


@of_keras_3
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [GroupedBatchNormalization, lambda **o: GhostBatchNormalization(**o, ghost_batch_size=9)],
)
def test_weights_of_half_precision(make, policy):
    """The subclasses, too."""
    layer, images = make(dtype=policy), batches(IMAGES)[0]
    outputs = layer(images, training=True)
    layer(images, training=False)
    assert outputs.dtype == layer.moving_mean.dtype == policy
    expected = (images - images.mean((0, 1, 2))) / np.sqrt(images.var((0, 1, 2)) + 1e-3)
    np.testing.assert_allclose(np.asarray(outputs, "float32"), expected, atol=0.03)


# --- Configuration and files


def network(layer):
    images = keras.Input(IMAGES[1:])
    return keras.Model(images, layer(images))


def test_weights_are_those_of_keras_layer(tmp_path):
    """A file of one's weights gives the other's."""
    layers = [BatchNormalization(name="n"), keras.layers.BatchNormalization(name="n")]
    for layer, other in (layers, layers[::-1]):
        model = network(layer)
        values = [np.random.default_rng(3).random(w.shape) for w in model.get_weights()]
        model.set_weights(values)
        model.save_weights(str(tmp_path / "w.weights.h5"))
        again = network(type(other).from_config(other.get_config()))
        again.load_weights(str(tmp_path / "w.weights.h5"))
        np.testing.assert_array_equal(again.get_weights(), model.get_weights())
        assert [w.name for w in again.weights] == [w.name for w in model.weights]


def test_options_are_kept(tmp_path):
    options = {"momentum": 0.5, "epsilon": 0.25, "scale": False, "unbiased_variance": True}
    model = network(BatchNormalization(**options))
    model(batches(IMAGES)[0], training=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    config = again.layers[1].get_config()
    assert type(again.layers[1]) is BatchNormalization
    assert {name: config[name] for name in options} == options
    np.testing.assert_array_equal(again.get_weights(), model.get_weights())
