"""SGD against NumPy, and what Goyal et al. 2017 say about it."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.optimizers import SGD, GradualWarmup, PiecewiseLinear, StepDecay
from imagenet_fast.optimizers.loss_scale import scaled_loss, with_loss_scale, without_all_reduce

STEPS = 24
SHAPES = [(3, 4), (4,), (2, 3, 2), ()]
MASK = [True, False, True, False]
FACTORS = [1, 0.015625, 0, 2.5]
# Warmup, plateau and two drops: the rate changes in 10 of the 24 steps.
RATES = GradualWarmup(StepDecay(0.4, [12, 18], 0.1), start=0.1, steps=8)


def rates(steps=STEPS):
    """The same, computed apart from the code; rounded to float32 as Keras keeps rates."""
    warm = [0.1 + 0.3 * step / 8 for step in range(8)]
    values = warm + [0.4] * 4 + [0.04] * 6 + [0.004] * (steps - 18)
    return np.array(values[:steps])


def problem(dtype, seed=0):
    """Weights, and gradients that depend on the weights: quadratic, with noise."""
    generator = np.random.default_rng(seed)
    weights = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    curvatures = [generator.uniform(0.1, 1.5, shape).astype(dtype) for shape in SHAPES]
    noise = [[generator.normal(size=s).astype(dtype) for s in SHAPES] for _ in range(STEPS)]

    def gradients(step, weights):
        return [c * w + n for c, w, n in zip(curvatures, weights, noise[step])]

    return weights, gradients


def train(optimizer, weights, gradients, steps=STEPS):
    """Returns the weights after all steps of a Keras optimizer."""
    variables = [tf.Variable(weight) for weight in weights]
    for step in range(steps):
        grads = gradients(step, [variable.numpy() for variable in variables])
        optimizer.apply_gradients(zip([tf.constant(g) for g in grads], variables))
    return [variable.numpy() for variable in variables]


def equation_9(weights, gradients, rates, momentum=0.9, nesterov=False, decay=0.0, mask=None):
    """u' = m u + g; w' = w - eta u'."""
    mask = mask or [True] * len(weights)
    weights = [np.array(weight) for weight in weights]
    momenta = [np.zeros_like(weight) for weight in weights]
    for step, rate in enumerate(rates):
        for i, g in enumerate(gradients(step, weights)):
            g = g + mask[i] * decay * weights[i]
            momenta[i] = momentum * momenta[i] + g
            direction = momentum * momenta[i] + g if nesterov else momenta[i]
            weights[i] = weights[i] - rate * direction
    return weights


def equation_10(weights, gradients, rates, momentum=0.9, corrected=True, decay=0.0):
    """v' = m v + eta g; w' = w - v'; corrected: v' = m (eta' / eta) v + eta' g."""
    weights = [np.array(weight) for weight in weights]
    velocities = [np.zeros_like(weight) for weight in weights]
    for step, rate in enumerate(rates):
        correction = rate / rates[step - 1] if corrected and step else 1.0
        for i, g in enumerate(gradients(step, weights)):
            velocities[i] *= momentum * correction
            velocities[i] += rate * (g + decay * weights[i])
            weights[i] = weights[i] - velocities[i]
    return weights


def assert_close(got, expected, rtol, atol=None):
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol if atol is None else atol)


def distance(got, expected):
    return max(np.abs(a - b).max() for a, b in zip(got, expected))


# --- Against NumPy


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("decay", "mask"), [(0.0, None), (0.05, None), (0.05, MASK), (0.05, FACTORS)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param("float32", 1e-5, marks=pytest.mark.long), ("float64", 1e-12)],
)
def test_many_steps_with_a_changing_rate(nesterov, decay, mask, dtype, tolerance):
    # In float64 only constants that float32 holds exactly: Keras keeps rates in float32.
    momentum, decay = (0.875, decay and 0.0625) if dtype == "float64" else (0.9, decay)
    schedule = GradualWarmup(StepDecay(0.5, [12, 18], 0.125), start=0.125, steps=8)
    values = [*(0.125 + 0.375 * np.arange(8) / 8), *[0.5] * 4, *[0.0625] * 6, *[0.0078125] * 6]
    weights, gradients = problem(dtype)
    optimizer = SGD(
        schedule,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=decay,
        weight_decay_mask=mask,
    )
    got = train(optimizer, weights, gradients)
    expected = equation_9(weights, gradients, values, momentum, nesterov, decay, mask)
    assert got[0].dtype == dtype
    assert_close(got, expected, tolerance)
    # What the case is about makes a difference that the tolerance would show.
    other = equation_9(weights, gradients, values, momentum, not nesterov, decay, mask)
    assert distance(got, other) > 1e-3
    if decay:
        other = equation_9(weights, gradients, values, momentum, nesterov, 0.0)
        assert distance(got, other) > 1e-3
    if mask:
        other = equation_9(weights, gradients, values, momentum, nesterov, decay)
        assert distance(got, other) > 1e-3


def test_without_momentum():
    weights, gradients = problem("float32")
    got = train(SGD(0.25, momentum=0.0), weights, gradients)
    assert_close(got, equation_9(weights, gradients, [0.25] * STEPS, momentum=0.0), 1e-5)


def test_rate_that_the_user_sets_between_steps():
    weights, gradients = problem("float32")
    optimizer = SGD(0.1)

    def with_rate(step, weights):
        optimizer.learning_rate = rates()[step]
        return gradients(step, weights)

    got = train(optimizer, weights, with_rate)
    assert_close(got, equation_9(weights, gradients, rates()), 1e-5)


def test_inside_a_graph():
    weights, gradients = problem("float32")
    variables = [tf.Variable(weight) for weight in weights]
    optimizer = SGD(RATES, nesterov=True, weight_decay=0.05, weight_decay_mask=MASK)
    optimizer.build(variables)

    @tf.function
    def step(grads):
        optimizer.apply_gradients(zip(grads, variables))

    for number in range(STEPS):
        grads = gradients(number, [variable.numpy() for variable in variables])
        step([tf.constant(g) for g in grads])
    expected = equation_9(weights, gradients, rates(), nesterov=True, decay=0.05, mask=MASK)
    assert_close([variable.numpy() for variable in variables], expected, 1e-5)


# --- Page 2019


def page(weights, gradients, schedule, rate_factors, batch=512):
    """d = -lr (g + wd w); v = .9 v + d; w += d + .9 v: of summed losses, biases by factors."""
    weights = [np.array(weight) for weight in weights]
    velocities = [np.zeros_like(weight) for weight in weights]
    for step, value in enumerate(schedule):
        for i, mean in enumerate(gradients(step, weights)):
            rate = value / batch * rate_factors[i]
            decay = 5e-4 * batch / rate_factors[i]
            d = -rate * (batch * mean + decay * weights[i])
            velocities[i] = 0.9 * velocities[i] + d
            weights[i] = weights[i] + d + 0.9 * velocities[i]
    return weights


@pytest.mark.parametrize("schedule", [StepDecay(0.0625), StepDecay(0.0625, [1, 2], 0.5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_biases_with_64_times_the_rate(schedule, dtype, tolerance):
    weights, gradients = problem(dtype)
    values = [float(schedule(step)) for step in range(3)]
    factors = [1, 64, 1, 64]
    options = {"nesterov": True, "weight_decay": 5e-4, "rate_factors": factors}
    page_decay = {"weight_decay_mask": [1, 1 / 64, 1, 1 / 64]}

    def three_steps(**changes):
        optimizer = SGD(schedule, **{**options, "rate_in_momentum": True, **page_decay, **changes})
        return train(optimizer, weights, gradients, steps=3)

    got, expected = three_steps(), page(weights, gradients, values, factors)
    assert_close(got, expected, tolerance)
    # What the case is about makes a difference that the tolerance would show.
    assert distance(three_steps(rate_factors=None), expected) > 0.1
    assert distance(three_steps(weight_decay_mask=None), expected) > 1e-2
    outside = distance(three_steps(rate_in_momentum=False), expected)
    assert outside > 0.1 if schedule.boundaries else outside < 1e-4


# --- Decoupled weight decay


def sgdw(weights, gradients, rates, peak, decay, nesterov, inside, mask, factors):
    """Loshchilov and Hutter 2019, algorithm 1, for a multiplier ``rate / peak`` of ``peak``.

    ``inside`` is their momentum; composer has the rate outside of it.
    """
    weights = [np.array(weight) for weight in weights]
    buffers = [np.zeros_like(weight) for weight in weights]
    for step, scheduled in enumerate(rates):
        for i, g in enumerate(gradients(step, weights)):
            rate = factors[i] * scheduled
            buffers[i] = 0.875 * buffers[i] + (rate * g if inside else g)
            ahead = 0.875 * buffers[i] + (rate * g if inside else g) if nesterov else buffers[i]
            lost = rate / peak * mask[i] * decay * weights[i]
            weights[i] = weights[i] - lost - (ahead if inside else rate * ahead)
    return weights


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_decoupled_weight_decay(nesterov, inside):
    schedule = GradualWarmup(StepDecay(0.5, [12, 18], 0.125), start=0.0, steps=8)
    values = [*(0.5 * np.arange(8) / 8), *[0.5] * 4, *[0.0625] * 6, *[0.0078125] * 6]
    weights, gradients = problem("float64")
    options = {"nesterov": nesterov, "rate_in_momentum": inside}
    # The third is not decayed; a bias with 4 times the rate loses as much as at its own.
    mask, factors = [1, 0.25, 0, 1], [1, 4, 1, 1]
    optimizer = SGD(
        schedule,
        momentum=0.875,
        weight_decay=0.03125,
        weight_decay_mask=mask,
        rate_factors=factors,
        decoupled_at_rate=0.5,
        **options,
    )
    got = train(optimizer, weights, gradients)

    def expected(peak=0.5, mask=mask):
        return sgdw(weights, gradients, values, peak, 0.03125, nesterov, inside, mask, factors)

    assert_close(got, expected(), 1e-12)
    assert distance(got, expected(peak=1.0)) > 1e-3
    assert distance(got, expected(mask=[1, 1, 0, 1])) > 1e-3
    again = SGD.from_config(json.loads(json.dumps(optimizer.get_config())))
    assert_close(train(again, weights, gradients), expected(), 1e-12)


def test_decay_decoupled_at_rate_1_is_keras():
    weights, gradients = problem("float32")
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
    own = SGD(RATES, rate_in_momentum=True, decoupled_at_rate=1.0, **options)
    other = keras.optimizers.SGD(RATES, **options)
    got = train(own, weights, gradients, steps=12)
    assert_close(got, train(other, weights, gradients, steps=12), 1e-5)
    coupled = SGD(RATES, rate_in_momentum=True, **options)
    assert distance(got, train(coupled, weights, gradients, steps=12)) > 1e-2


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_decoupled_at_no_rate(rate):
    with pytest.raises(UserError, match=r"decoupled_at_rate is .* must be positive"):
        SGD(0.1, decoupled_at_rate=rate)


@pytest.mark.parametrize("rate", [0.25, PiecewiseLinear([0, 60], [0.25, 0.0])])
def test_a_rate_that_falls_to_0_sooner(rate):
    """airbench94_muon: the whitening layer's bias has initial_lr * (1 - step / its steps)."""
    weights, gradients = problem("float64")
    optimizer = SGD(rate, nesterov=True, zero_rate_at=[0, 4, 0, 0], rate_factors=[1, 2, 1, 1])
    got = train(optimizer, weights, gradients, steps=6)
    others = [0.25 if rate == 0.25 else 0.25 * (1 - step / 60) for step in range(6)]
    own = [2 * 0.25 * max(0, 1 - step / 4) for step in range(6)]
    expected = equation_9(weights, gradients, others, nesterov=True)
    expected[1] = equation_9(weights, gradients, own, nesterov=True)[1]
    assert_close(got, expected, 1e-6)


# --- Momentum correction (remark 2)


@pytest.mark.skipif(KERAS_2, reason="of Keras 3")
def test_a_rate_that_falls_to_0_sooner_counts_as_schedules():
    """Accumulated gradients, too."""
    weights, gradients = problem("float32")
    fall = PiecewiseLinear([0, 8], [0.5, 0.0])
    options = {"gradient_accumulation_steps": 2}
    found = train(SGD(fall, zero_rate_at=[8] * 4, **options), weights, gradients, 6)
    assert_close(found, train(SGD(fall, **options), weights, gradients, 6), 1e-6)


def test_needs_no_momentum_correction():
    """Equation (9) is (10) with the correction, whatever the rate does; without it, it is not."""
    weights, gradients = problem("float64")
    got = train(SGD(RATES), weights, gradients)
    assert_close(got, equation_10(weights, gradients, rates()), 1e-6)
    uncorrected = equation_10(weights, gradients, rates(), corrected=False)
    assert distance(got, uncorrected) > 1e-2
    inside = train(SGD(RATES, rate_in_momentum=True), weights, gradients)
    assert_close(inside, uncorrected, 1e-6)


def test_decay_with_the_rate_in_the_momentum():
    weights, gradients = problem("float32")
    options = {"corrected": False, "decay": 0.05}
    for rate_factor in (1, 2):
        got = train(
            SGD(RATES, weight_decay=0.05, rate_in_momentum=True, rate_factors=[rate_factor] * 4),
            weights,
            gradients,
        )
        expected = equation_10(weights, gradients, rate_factor * rates(), **options)
        assert_close(got, expected, 1e-5)


@pytest.mark.parametrize(
    ("nesterov", "inside"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.long),
    ],
)
def test_keras_sgd_is_the_uncorrected_form(nesterov, inside):
    """As long as the rate stays, both are the same."""
    weights, gradients = problem("float32")

    def both(rate):
        keras_sgd = keras.optimizers.SGD(rate, momentum=0.9, nesterov=nesterov)
        return (
            train(SGD(rate, nesterov=nesterov, rate_in_momentum=inside), weights, gradients),
            train(keras_sgd, weights, gradients),
        )

    assert_close(*both(0.125), 1e-5)
    if inside:
        assert_close(*both(RATES), 1e-5)
    else:
        assert distance(*both(RATES)) > 1e-2


# --- Scaling the loss is not scaling the rate (remark 1)


def test_scaling_the_loss_is_scaling_the_rate_only_without_decay():
    weights, gradients = problem("float32")

    def doubled(step, weights):
        return [gradient + gradient for gradient in gradients(step, weights)]

    def both(decay):
        return (
            train(SGD(0.0625, weight_decay=decay), weights, doubled),
            train(SGD(0.125, weight_decay=decay), weights, gradients),
        )

    assert_close(*both(0.0), 1e-5)
    assert distance(*both(0.05)) > 1e-2


# --- Keras' options


def test_weight_decay_is_not_keras_decoupled_one():
    """The decay is in the momentum buffer; it is applied once."""
    variable = tf.Variable([2.0])
    optimizer = SGD(0.5, momentum=0.5, weight_decay=0.25)
    optimizer.apply_gradients([(tf.constant([0.0]), variable)])
    assert variable.numpy() == [1.75]
    assert optimizer.momentums[0].numpy() == [0.5]


@pytest.mark.parametrize(
    ("options", "clipped"),
    [
        ({"clipnorm": 1.0}, [[0.6, 0.8], [1.0]]),
        ({"global_clipnorm": 6.5}, [[1.5, 2.0], [6.0]]),
        ({"clipvalue": 3.5}, [[3.0, 3.5], [3.5]]),
    ],
)
def test_clipping(options, clipped):
    """Of the gradient; the decay comes after."""
    grads = [[3.0, 4.0], [12.0]]
    weights = [np.ones(2, "float32"), np.ones(1, "float32")]
    got = train(
        SGD(1.0, weight_decay=0.5, **options),
        weights,
        lambda step, _: [np.array(g, "float32") for g in grads],
        steps=1,
    )
    for weight, gradient in zip(got, clipped):
        np.testing.assert_allclose(weight, 1 - (np.array(gradient) + 0.5), rtol=1e-6)


def test_moving_average_of_the_weights():
    variable = tf.Variable([1.0])
    optimizer = SGD(0.5, momentum=0.0, use_ema=True, ema_momentum=0.75)
    for expected in (0.5, 0.0):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        assert variable.numpy() == [expected]
    optimizer.finalize_variable_values([variable])
    # Keras 3 averages from the first step's result on, Keras 2 from the initial value.
    start = 1.0 if KERAS_2 else 0.5
    after_one = 0.75 * start + 0.25 * 0.5
    assert variable.numpy() == [0.75 * after_one]


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_sparse_gradient(decay):
    """Of an embedding: repeated rows add up, and all rows move and decay as with a dense one."""
    table = np.arange(8, dtype="float32").reshape(4, 2)
    values = np.array([[1, 2], [3, 4], [5, 6]], "float32")
    sparse = tf.IndexedSlices(tf.constant(values), tf.constant([3, 1, 3]), tf.constant([4, 2]))
    dense = np.array([[0, 0], [3, 4], [0, 0], [6, 8]], "float32")
    results = []
    for gradient in (sparse, tf.constant(dense)):
        variable = tf.Variable(table)
        optimizer = SGD(0.5, nesterov=True, weight_decay=decay)
        for _ in range(3):
            optimizer.apply_gradients([(gradient, variable)])
        results.append([variable.numpy()])
    assert_close(*results, 1e-6)
    expected = equation_9([table], lambda *_: [dense], [0.5] * 3, nesterov=True, decay=decay)
    assert_close(results[0], expected, 1e-6)


def test_gradient_of_another_type():
    """Is cast, as in Keras 3's optimizers; TensorFlow's kernel would end the process."""
    variable = tf.Variable([1.0])
    SGD(0.5).apply_gradients([(tf.constant([1.0], tf.float64), variable)])
    assert variable.numpy() == [0.5]


def test_loss_scale():
    variable = tf.Variable([2.0])
    optimizer = with_loss_scale(SGD(0.5, momentum=0.0, weight_decay=0.25), 1024)
    assert scaled_loss(optimizer, tf.constant(1.0)) == 1024
    with without_all_reduce(optimizer) as update:
        update([tf.constant([1024.0])], [variable])
    assert variable.numpy() == [1.25]


def test_mask_follows_the_variables_not_the_order_of_the_gradients():
    variables = [tf.Variable([1.0]), tf.Variable([1.0])]
    optimizer = SGD(1.0, momentum=0.0, weight_decay=0.5, weight_decay_mask=[True, False])
    optimizer.build(variables)
    zero = tf.constant([0.0])
    optimizer.apply_gradients([(zero, variables[1]), (zero, variables[0])])
    assert [variable.numpy() for variable in variables] == [[0.5], [1.0]]


def test_momentum_is_among_the_variables_of_a_checkpoint(tmp_path):
    weights, gradients = problem("float32")
    first, second = ([tf.Variable(w) for w in weights] for _ in range(2))

    def step(optimizer, variables, number):
        grads = gradients(number, [variable.numpy() for variable in variables])
        optimizer.apply_gradients(zip(map(tf.constant, grads), variables))

    optimizer = SGD(RATES)
    for number in range(5):
        step(optimizer, first, number)
    path = tf.train.Checkpoint(o=optimizer, v=first).write(str(tmp_path / "c"))
    step(optimizer, first, 5)

    other = SGD(RATES)
    other.build(second)
    tf.train.Checkpoint(o=other, v=second).read(path).assert_consumed()
    step(other, second, 5)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


# --- Serialization


def make_all_different():
    return SGD(
        GradualWarmup(StepDecay(0.4, [12, 18], 0.1), start=0.1, steps=8),
        momentum=0.8,
        nesterov=True,
        weight_decay=0.05,
        rate_in_momentum=True,
        weight_decay_mask=np.array(MASK),
        rate_factors=np.array([1, 64, 1, 64]),
        name="mine",
        global_clipnorm=5.0,
    )


def through_config(optimizer):
    return SGD.from_config(optimizer.get_config())


def through_keras(optimizer):
    return keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))


def through_json(optimizer):
    return keras.optimizers.deserialize(
        json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    )


@pytest.mark.parametrize("through", [through_config, through_keras, through_json])
@pytest.mark.parametrize("make", [make_all_different, lambda: SGD(0.25)], ids=["all", "plain"])
def test_serialization(through, make):
    optimizer = make()
    again = through(optimizer)
    assert type(again) is SGD
    assert again.get_config() == optimizer.get_config()
    weights, gradients = problem("float32")
    for a, b in zip(train(again, weights, gradients), train(optimizer, weights, gradients)):
        np.testing.assert_array_equal(a, b)


def test_config_has_all_options():
    config = make_all_different().get_config()
    assert config["momentum"] == 0.8
    assert config["nesterov"] is True
    assert config["weight_decay"] == 0.05
    assert config["rate_in_momentum"] is True
    assert config["weight_decay_mask"] == MASK
    assert config["rate_factors"] == [1, 64, 1, 64]
    assert config["global_clipnorm"] == 5.0
    assert config["name"] == "mine"
    assert SGD(0.25).get_config()["weight_decay_mask"] is None
    assert SGD(0.25).get_config()["learning_rate"] == 0.25


def test_keras_name_gives_keras_sgd():
    """Registered under the package's name, so that nobody's "sgd" changes its meaning."""
    assert type(keras.optimizers.get("sgd")) is keras.optimizers.SGD


def test_in_a_custom_model(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(
        SGD(0.05, nesterov=True, weight_decay=1e-4, weight_decay_mask=[True, False]), "mse"
    )
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x[:, :3] * 2
    history = model.fit(x, y, epochs=8, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0] / 10
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is SGD
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for optimizer, network in ((model.optimizer, model), (again.optimizer, again)):
        assert optimizer.iterations.numpy() == 16
        network.fit(x, y, shuffle=False, verbose=0)
    assert_close(model.get_weights(), again.get_weights(), 1e-6)
