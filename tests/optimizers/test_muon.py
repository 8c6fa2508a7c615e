"""Muon against NumPy, singular values and all; and the steps of airbench's recipe."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.optimizers import Muon, PiecewiseLinear, orthogonalize

SHAPES = [(3, 3, 4, 8), (8,), (1, 1, 8, 6), (6,), (6, 5)]
FILTERS = [True, False, True, False, False]
STEPS = 3


def problem():
    generator = np.random.default_rng(0)

    def normal():
        return [generator.normal(size=shape).astype("float32") for shape in SHAPES]

    return normal(), [normal() for _ in range(STEPS)]


def train(optimizer, weights, gradients):
    variables = [tf.Variable(weight) for weight in weights]
    for grads in gradients:
        optimizer.apply_gradients([(tf.constant(g), v) for g, v in zip(grads, variables)])
    return [variable.numpy() for variable in variables]


# --- The rule written again, in float64, with filters as PyTorch has them


def newton_schulz(matrix, steps, coefficients=(3.4445, -4.7750, 2.0315)):
    a, b, c = coefficients
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    x = x.T if len(matrix) > len(matrix[0]) else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(matrix) > len(matrix[0]) else x


def muon(start, gradients, rates, momentum=0.6, nesterov=True):
    w = start.astype("float64").transpose(3, 2, 0, 1)
    buffer = np.zeros_like(w)
    for rate, g in zip(rates, gradients):
        g = g.astype("float64").transpose(3, 2, 0, 1)
        buffer = momentum * buffer + g
        direction = g + momentum * buffer if nesterov else buffer
        w = w * len(w) ** 0.5 / np.linalg.norm(w)
        w = w - rate * newton_schulz(direction.reshape(len(w), -1), 3).reshape(w.shape)
    return w.transpose(2, 3, 1, 0)


def sgd(start, gradients, rates, momentum=0.85, nesterov=True, decay=0.0):
    w, buffer = start.astype("float64"), np.zeros(start.shape)
    for rate, g in zip(rates, gradients):
        g = g + decay * w
        buffer = momentum * buffer + g
        w = w - rate * (g + momentum * buffer if nesterov else buffer)
    return w


def assert_close(got, expected, tolerance=1e-5):
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mask", [None, FILTERS], ids=["by shape", "mask"])
def test_three_steps(nesterov, mask):
    weights, gradients = problem()
    schedule = PiecewiseLinear([0, 3], [0.25, 0.0625])
    rates = [0.25, 0.1875, 0.125]
    optimizer = Muon(schedule, nesterov=nesterov, filter_mask=mask, newton_schulz_dtype="float32")
    got = train(optimizer, weights, gradients)

    def expected(nesterov=nesterov, momentum=0.6):
        return [
            muon(w, own, rates, momentum, nesterov) if f else sgd(w, own, rates, 0.85, nesterov)
            for f, w, own in zip(FILTERS, weights, zip(*gradients))
        ]

    assert_close(got, expected())
    # What the case is about makes a difference that the tolerance would show.
    for changes in ({"nesterov": not nesterov}, {"momentum": 0.85}):
        other = expected(**changes)
        assert np.abs(got[0] - other[0]).max() > 1e-2


def test_airbench():
    """Its rates are of summed losses, and its decay is 2e-6 * 2000 over the rate that begins."""
    weights, gradients = problem()
    batch, steps = 2000, 200
    filters, biases, head = 0.24, 0.053, 0.67
    rates = {0: filters, 1: biases, 2: filters, 3: biases, 4: head}
    optimizer = Muon(
        PiecewiseLinear([0, steps], [filters, 0.0]),
        weight_decay=2e-6,
        weight_decay_mask=[0 if f else 1 / rates[i] for i, f in enumerate(FILTERS)],
        rate_factors=[1 if f else batch * rates[i] / filters for i, f in enumerate(FILTERS)],
        newton_schulz_dtype="float32",
    )
    means = [[g / batch for g in grads] for grads in gradients]
    got = train(optimizer, weights, means)

    def expected(decay):
        left = [1 - step / steps for step in range(STEPS)]
        return [
            muon(w, own, [rates[i] * x for x in left])
            if FILTERS[i]
            else sgd(w, own, [rates[i] * x for x in left], decay=decay / rates[i])
            for i, (w, own) in enumerate(zip(weights, zip(*gradients)))
        ]

    assert_close(got, expected(2e-6 * batch))
    assert np.abs(got[4] - expected(0.0)[4]).max() > 1e-2


def test_decoupled_weight_decay_is_for_all_but_filters():
    """Without gradients, three steps at half the rate take a quarter each."""
    weights, _ = problem()
    zeros = [[np.zeros_like(w) for w in weights]] * 3
    options = {"weight_decay": 0.5, "newton_schulz_dtype": "float32"}
    got = train(Muon(0.25, decoupled_at_rate=0.5, **options), weights, zeros)
    coupled = train(Muon(0.25, **options), weights, zeros)
    for own, other, start, is_filter in zip(got, coupled, weights, FILTERS):
        if is_filter:
            np.testing.assert_array_equal(own, other)
        else:
            np.testing.assert_allclose(own, 0.75**3 * start, rtol=1e-5)


def hiverge(start, gradients, rate, total):
    """The filters of cifar10_speedrun.py, without its weight decay and epsilons."""
    w = start.astype("float64").transpose(3, 2, 0, 1)
    buffer, latest = np.zeros_like(w), 0
    for step, g in enumerate(gradients, start=1):
        g = g.astype("float64").transpose(3, 2, 0, 1)
        buffer = 0.655 * buffer + g
        if step - latest >= 2 + int(15 * step / total):
            latest = step
            w = w * len(w) ** 0.5 / np.linalg.norm(w)
        direction = (g + 0.655 * buffer).reshape(len(w), -1)
        w = w - rate * newton_schulz(direction, 3, (3.4576, -4.7391, 2.0843)).reshape(w.shape)
    return w.transpose(2, 3, 1, 0)


def test_speedrun():
    generator = np.random.default_rng(4)
    weight, *gradients = generator.normal(size=(13, 3, 3, 4, 8)).astype("float32")
    options = {"filter_momentum": 0.655, "newton_schulz_dtype": "float32"}
    optimizer = Muon(
        0.1,
        coefficients=(3.4576, -4.7391, 2.0843),
        norm_every=(2, 17),
        total_steps=60,
        **options,
    )
    (found,) = train(optimizer, [weight], [[g] for g in gradients])
    np.testing.assert_allclose(found, hiverge(weight, gradients, 0.1, 60), rtol=0, atol=2e-5)
    (other,) = train(Muon(0.1, **options), [weight], [[g] for g in gradients])
    assert np.abs(found - other).max() > 1e-2
    again = Muon.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    ("every", "total", "steps"),
    [((1,), None, range(1, 13)), ((3,), None, (3, 6, 9, 12)), ((2, 17), 60, (2, 5, 9))],
)
def test_steps_that_reset_norms(every, total, steps):
    optimizer = Muon(0.0, norm_every=every, total_steps=total)
    variable, found = tf.Variable(tf.ones([1, 1, 2, 4])), []
    for step in range(1, 13):
        variable.assign(tf.ones([1, 1, 2, 4]))
        optimizer.apply_gradients([(tf.ones([1, 1, 2, 4]), variable)])
        found += [step] if variable.numpy().max() < 0.9 else []
    assert found == list(steps)


@pytest.mark.parametrize(
    ("every", "message"),
    [((0,), "must be one or two positive numbers"), ((2, 17), "two numbers need total_steps")],
)
def test_invalid_steps_between_resets(every, message):
    with pytest.raises(UserError, match=message):
        Muon(norm_every=every)


def test_bfloat16_is_near():
    """A step of it, of float32 but for what is orthogonalized."""
    weights, gradients = problem()
    half = train(Muon(0.25), weights, gradients[:1])
    whole = train(Muon(0.25, newton_schulz_dtype="float32"), weights, gradients[:1])
    for a, b, is_filter in zip(half, whole, FILTERS):
        assert a.dtype == "float32"
        difference, step = np.linalg.norm(a - b), 0.25 * a.shape[-1] ** 0.5
        assert (0 < difference < 0.02 * step) if is_filter else difference == 0


# --- Orthogonal matrices


@pytest.mark.parametrize("shape", [(27, 8), (8, 27), (16, 16)])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_polynomial_of_singular_values(shape, steps):
    matrix = np.random.default_rng(1).normal(size=shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left * values @ right
    np.testing.assert_allclose(newton_schulz(matrix, steps), expected, atol=1e-6)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.03)):
        found = orthogonalize(tf.constant(matrix, tf.float32), steps, dtype)
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [3, 5])
def test_singular_values_are_about_1(steps, dtype):
    """The polynomial's extremes: at 0.54 it is 1.2024, and there 0.6818."""
    # As of a wide filter: well-conditioned.
    matrix = np.random.default_rng(2).normal(size=(64 * 9, 32)).astype("float32")
    values = np.linalg.svd(orthogonalize(tf.constant(matrix), steps, dtype), compute_uv=False)
    rounding = {"float32": 1e-4, "bfloat16": 0.01}[dtype]
    assert values.min() > 0.6818 - rounding
    assert values.max() < 1.2024 + rounding


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_gradients_norm_has_no_effect(scale):
    weights, gradients = problem()
    optimizers = [Muon(newton_schulz_dtype="float32") for _ in range(2)]
    scaled = [[np.float32(scale) * g for g in grads] for grads in gradients]
    found = train(optimizers[0], weights, scaled)
    expected = train(optimizers[1], weights, gradients)
    assert_close(found[:1], expected[:1], 2e-5)
    assert np.abs(found[1] - expected[1]).max() > 0.1


def test_zeros():
    """A filter of zeros has no norm that could be made another; one of gradients, no direction."""
    ones = np.ones((1, 1, 4, 4), "float32")
    (found,) = train(Muon(0.5), [0 * ones], [[ones]])
    assert np.isfinite(found).all() and np.abs(found).max() > 0.05
    (found,) = train(Muon(0.5), [3 * ones], [[0 * ones]])
    np.testing.assert_allclose(np.linalg.norm(found), 2.0, rtol=1e-6)


# --- Options


def test_filter_that_is_no_matrix():
    variables = [tf.Variable(tf.ones([1, 1, 2, 2])), tf.Variable([1.0, 2.0], name="gamma")]
    optimizer = Muon(filter_mask=[True, True])
    with pytest.raises(UserError, match=r"entry 1 for gamma, of shape \(2,\), which is no matri"):
        optimizer.build(variables)


def test_matrices_by_mask():
    """What is a filter is the user's to say."""
    weight, gradient = np.eye(6, 4, dtype="float32"), np.ones((6, 4), "float32")
    options = {"newton_schulz_dtype": "float32"}
    (found,) = train(Muon(0.5, filter_mask=[True], **options), [weight], [[gradient]])
    expected = muon(weight[None, None], [gradient[None, None]], [0.5])[0, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (found,) = train(Muon(0.5, **options), [weight], [[gradient]])
    np.testing.assert_allclose(found, sgd(weight, [gradient], [0.5]), atol=1e-5)


def test_config_has_all_options():
    optimizer = Muon(
        0.5,
        momentum=0.8,
        nesterov=False,
        filter_mask=np.array([True, False]),
        filter_momentum=0.5,
        newton_schulz_steps=5,
        newton_schulz_dtype="float32",
        weight_decay=0.05,
        rate_factors=[1, 2],
    )
    config = optimizer.get_config()
    assert (config["learning_rate"], config["momentum"], config["nesterov"]) == (0.5, 0.8, False)
    assert config["filter_mask"] == [True, False]
    assert (config["filter_momentum"], config["newton_schulz_steps"]) == (0.5, 5)
    assert config["newton_schulz_dtype"] == "float32"
    assert (config["weight_decay"], config["rate_factors"]) == (0.05, [1, 2])
    assert Muon.from_config(dict(config)).get_config() == config


@pytest.mark.long
def test_in_a_saved_model(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Muon(0.1, rate_factors=[1, 0.5, 0.5, 0.5]), loss)
    x = np.random.default_rng(0).normal(size=(64, 6, 6, 3)).astype("float32")
    y = (x[:, :, :, 0].max((1, 2)) > x[:, :, :, 1].max((1, 2))).astype("int32")
    losses = model.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is Muon
    for network in (model, again):
        network.fit(x, y, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)
