"""Moving averages over micro-batches against NumPy, and against Keras' own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import GhostBatchNormalization, GroupedBatchNormalization
from imagenet_fast.pipeline_parallel.statistics import Moments, batch_norms, commit, observed

BatchNorm = keras.layers.BatchNormalization
MOMENTUM = 0.75


def draw(*shape):
    return np.random.default_rng(0).normal(2.0, 3.0, shape).astype("float32")


def take(norms, call, parts):
    """Has a function called with each part, and the averages moved by all of them."""
    totals = {}
    for part in parts:
        with observed(norms) as moments:
            call(tf.constant(part))
        for place, own in moments.items():
            before = totals.get(place, Moments(0.0, 0.0, 0.0))
            totals[place] = Moments(*(a + b for a, b in zip(before, own)))
    commit(norms, totals)
    return totals


def averages(norm):
    return norm.moving_mean.numpy(), norm.moving_variance.numpy()


def moved(value, begin):
    return MOMENTUM * begin + (1 - MOMENTUM) * value


def check(norm, parts, ddof, axes):
    """That the averages move by the mean and the variance of all parts together.

    Returns:
      What the parts add up to.
    """
    norm.build(parts[0].shape)
    totals = take([norm], lambda part: norm(part, training=True), parts)
    whole = np.concatenate(parts).astype("float64")
    mean, variance = averages(norm)
    np.testing.assert_allclose(mean, moved(whole.mean(axes), 0.0), rtol=1e-5)
    np.testing.assert_allclose(variance, moved(whole.var(axes, ddof=ddof), 1.0), rtol=1e-5)
    return totals


def test_masked_positions_do_not_count():
    """Keras' batch norm computes its statistics from the others."""
    norm, values, lengths = BatchNorm(momentum=MOMENTUM), draw(4, 5, 3), [5, 4, 1, 1]
    norm.build(values.shape)
    mask = np.arange(5) < np.array(lengths)[:, None]
    masks = iter(np.split(mask, 2))
    take([norm], lambda part: norm(part, training=True, mask=next(masks)), np.split(values, 2))
    mean, variance = averages(norm)
    assert not norm.fused
    np.testing.assert_allclose(mean, moved(values[mask].mean(0), 0.0), rtol=1e-5)
    np.testing.assert_allclose(variance, moved(values[mask].var(0), 1.0), rtol=1e-5)


@pytest.mark.parametrize("kind", [BatchNorm, GroupedBatchNormalization])
@pytest.mark.parametrize("sizes", [[6], [3, 3], [3, 2, 1], [1] * 6])
def test_images(kind, sizes):
    """Keras' fused kernel, whose variance is unbiased."""
    norm = kind(momentum=MOMENTUM)
    parts = np.split(draw(6, 4, 5, 3), np.cumsum(sizes)[:-1])
    check(norm, parts, ddof=1, axes=(0, 1, 2))
    assert norm.fused


@pytest.mark.parametrize("sizes", [[7], [3, 2, 2]])
def test_vectors(sizes):
    norm = BatchNorm(momentum=MOMENTUM)
    check(norm, np.split(draw(7, 3), np.cumsum(sizes)[:-1]), ddof=0, axes=0)
    assert not norm.fused


def test_images_without_the_fused_kernel():
    norm = BatchNorm(momentum=MOMENTUM, fused=False)
    check(norm, np.split(draw(5, 2, 2, 3), [3]), ddof=0, axes=(0, 1, 2))


def test_channels_that_come_first():
    totals = check(BatchNorm(axis=1, momentum=MOMENTUM), np.split(draw(5, 3, 4), [3]), 0, (0, 2))
    assert totals[0].count == 5 * 4


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision(dtype):
    """The statistics are of the values in half precision, and float32 themselves."""
    norm = BatchNorm(momentum=MOMENTUM, dtype=dtype)
    parts = [tf.cast(own, norm.compute_dtype).numpy() for own in np.split(draw(6, 4, 4, 3), [4])]
    check(norm, [own.astype("float32") for own in parts], ddof=1, axes=(0, 1, 2))


def test_double_precision():
    norm = BatchNorm(momentum=MOMENTUM, dtype="float64")
    check(norm, np.split(draw(7, 3).astype("float64"), [4]), ddof=0, axes=0)


def test_a_mean_of_many_deviations():
    norm = BatchNorm(momentum=MOMENTUM, moving_mean_initializer=keras.initializers.Constant(1001))
    parts = np.split(1000 + draw(6, 4, 4, 3) / 3, [4])
    norm.build(parts[0].shape)
    take([norm], lambda part: norm(part, training=True), parts)
    whole = np.concatenate(parts).astype("float64")
    mean, variance = averages(norm)
    np.testing.assert_allclose(mean, moved(whole.mean((0, 1, 2)), 1001), rtol=1e-6)
    np.testing.assert_allclose(variance, moved(whole.var((0, 1, 2), ddof=1), 1), rtol=1e-5)


@pytest.mark.parametrize("shape", [(8, 4, 4, 3), (8, 3), (1, 1, 1, 3), (2, 1, 1, 3)])
@pytest.mark.parametrize("ghosts", [0, 2])
def test_of_one_micro_batch_they_are_those_of_keras(shape, ghosts):
    options = {"momentum": MOMENTUM, "moving_mean_initializer": "ones"}
    kind = GhostBatchNormalization if ghosts else BatchNorm
    options.update({"ghost_batch_size": ghosts} if ghosts else {})
    plain, norm = kind(**options), kind(**options)
    images = tf.constant(draw(*shape))
    expected = plain(images, training=True)
    norm.build(shape)
    outputs = []
    take([norm], lambda part: outputs.append(norm(part, training=True)), [images])
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-5, atol=1e-6)
    for own, aim in zip(averages(norm), averages(plain)):
        np.testing.assert_allclose(own, aim, rtol=1e-5)


def test_ghost_batch_norm_takes_the_mean_over_all_groups():
    norm = GhostBatchNormalization(ghost_batch_size=2, momentum=MOMENTUM)
    values = draw(6, 5, 3)
    norm.build(values.shape)
    parts = np.split(values, [4])
    take([norm], lambda part: norm(part, training=True), parts)
    # Image n belongs to group n modulo the number of groups: 2 in the first part, 1 in the last.
    groups = [parts[0][0::2], parts[0][1::2], parts[1]]
    variance = np.mean([own.var((0, 1), ddof=1) for own in groups], axis=0)
    np.testing.assert_allclose(norm.moving_mean, moved(values.mean((0, 1)), 0), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, moved(variance, 1), rtol=1e-5)


def test_rounding_leaves_no_negative_variance():
    """E[x^2] and E[x]^2 of a constant are not the same in each of so many channels."""
    norm = BatchNorm(momentum=MOMENTUM)
    values = np.repeat(draw(1, 500), 7, axis=0)
    norm.build(values.shape)
    take([norm], lambda part: norm(part, training=True), np.split(values, [3]))
    assert np.all(norm.moving_variance.numpy() >= MOMENTUM)
    assert np.any(norm.moving_variance.numpy() > MOMENTUM)


def test_averages_stay_until_the_commit_and_the_layer_is_as_before_afterwards():
    norm = BatchNorm(momentum=MOMENTUM)
    images = tf.constant(draw(4, 2, 2, 3))
    norm.build(images.shape)
    attributes = dict(norm.__dict__)
    with observed([norm]) as moments:
        norm(images, training=True)
        np.testing.assert_array_equal(norm.moving_mean, np.zeros(3))
        np.testing.assert_array_equal(norm.moving_variance, np.ones(3))
    assert list(moments) == [0]
    assert norm.__dict__.keys() == attributes.keys()
    assert norm.momentum == MOMENTUM
    norm(images, training=True)
    np.testing.assert_allclose(norm.moving_mean, moved(images.numpy().mean((0, 1, 2)), 0), 1e-5)


def test_also_if_something_fails_inside():
    norm = BatchNorm(momentum=MOMENTUM)
    with pytest.raises(ZeroDivisionError), observed([norm]):
        raise ZeroDivisionError
    assert norm.momentum == MOMENTUM
    assert "call" not in norm.__dict__


def test_what_is_not_trained_does_not_move():
    frozen, unused, trained = (BatchNorm(momentum=MOMENTUM) for _ in range(3))
    norms = [frozen, unused, trained]
    for norm in norms:
        norm.build((None, 3))
    frozen.trainable = False

    def call(part):
        # By its averages, as outside of training.
        np.testing.assert_allclose(frozen(part, training=True), part / np.sqrt(1.001), rtol=1e-5)
        unused(part, training=False)
        trained(part, training=True)

    assert list(take(norms, call, [draw(4, 3)])) == [2]
    for norm in (frozen, unused):
        np.testing.assert_array_equal(averages(norm), [[0] * 3, [1] * 3])
    assert np.all(trained.moving_mean.numpy() != 0)


@pytest.mark.parametrize("first", [True, False])
def test_a_call_outside_of_training_beside_one_in_training_does_not_count(first):
    norm = BatchNorm(momentum=MOMENTUM)
    norm.build((None, 3))

    def call(part):
        norm(part, training=first)
        norm(part[:1], training=not first)

    values = draw(4, 3)
    ((count, *_),) = take([norm], call, [values]).values()
    assert count == (4 if first else 1)
    mean = values.mean(0) if first else values[0]
    np.testing.assert_allclose(norm.moving_mean, moved(mean, 0), rtol=1e-5)


def test_two_calls_in_training_are_refused():
    norm = BatchNorm(name="twin")
    with (
        pytest.raises(UserError, match=r"'twin' is called twice.*a layer of its own"),
        observed([norm]),
    ):
        norm(norm(draw(4, 3), training=True), training=True)


@pytest.mark.parametrize("how", ["function", "branch"])
def test_a_call_in_a_graph_within_is_refused(how):
    norm = BatchNorm(name="inner")
    norm.build((None, 3))
    function = tf.function(lambda x: norm(x, training=True))

    @tf.function(autograph=False)
    def step(values):
        with observed([norm]):
            if how == "function":
                return function(values)
            return tf.cond(values[0, 0] > 0, lambda: norm(values, training=True), lambda: values)

    with pytest.raises(UserError, match=r"'inner' is called in a tf.function.*call it outside"):
        step(tf.constant(draw(4, 3)))


def test_all_batch_norms_once_in_a_fixed_order():
    names = ["first", "twice", "last", "alone"]
    norms = {name: BatchNorm(name=name) for name in names}
    inner = keras.Sequential([keras.layers.Dense(3), norms["twice"], norms["last"]])
    blocks = [
        keras.Sequential([keras.Input([3]), norms["first"], inner]),
        keras.layers.Dense(3),
        keras.Sequential([norms["twice"]]),
        norms["alone"],
    ]
    found = batch_norms(blocks)
    assert sorted(own.name for own in found) == sorted(names)
    assert found == batch_norms(blocks)
    assert found[0] is norms["first"]
    assert found[-1] is norms["alone"]
