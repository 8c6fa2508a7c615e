"""LARS against values of the published rule, NumPy, and what float16 would do to it."""

import json
import textwrap
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast.base.errors import UserError
from imagenet_fast.models import build
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.optimizers import LARS, GradualWarmup, Role, StepDecay, variable_roles
from imagenet_fast.optimizers.loss_scale import scaled_loss, with_loss_scale, without_all_reduce
from imagenet_fast.training.build.model import build_model

STEPS = 50
SHAPES = [(3, 4), (4,), (2, 3, 2), (1,), (5,)]
DECAYED = [True, False, True, True, False]
TRUSTED = [True, False, True, False, True]


def problem(dtype, shapes=SHAPES):
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=shape).astype(dtype) for shape in shapes]
    noise = [[generator.normal(size=s).astype(dtype) for s in shapes] for _ in range(STEPS)]
    return weights, noise


def train(optimizer, weights, gradients):
    variables = [tf.Variable(weight) for weight in weights]
    optimizer.build(variables)

    @tf.function
    def step(grads):
        optimizer.apply_gradients(zip(grads, variables))

    for grads in gradients:
        step([tf.constant(g) for g in grads])
    return [variable.numpy() for variable in variables]


def reference(
    weights,
    gradients,
    rates,
    momentum=0.9,
    decay=0.0,
    eeta=0.001,
    epsilon=0.0,
    nesterov=False,
    inside=True,
    decayed=None,
    trusted=None,
    factors=None,
):
    """The rule written again, one variable after the other."""
    results = []
    for i, start in enumerate(weights):
        w, v = np.array(start), np.zeros_like(start)
        own = decay if decayed is None else decayed[i] * decay
        for rate, grads in zip(rates, gradients):
            rate = rate if factors is None else factors[i] * rate
            g = grads[i]
            norm_w, norm_g = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
            trust = 1.0
            if (trusted is None or trusted[i]) and norm_w > 0 and norm_g > 0:
                trust = eeta * norm_w / (norm_g + own * norm_w + epsilon)
            update = trust * (g + own * w)
            if inside:
                v = momentum * v + rate * update
                w = w - (momentum * v + rate * update if nesterov else v)
            else:
                v = momentum * v + update
                w = w - rate * (momentum * v + update if nesterov else v)
        results.append(w)
    return results


def distance(got, expected):
    return max(np.abs(a - b).max() for a, b in zip(got, expected))


# --- The rule


@pytest.mark.parametrize(
    ("decay", "epsilon", "trust", "after", "tolerance"),
    [
        (1e-4, 0.0, 0.004997501249375313, (2.97, 3.96), 1e-14),
        (2e-4, 1e-5, 0.004994955095353693, (2.9700003, 3.9600004), 1e-7),
    ],
)
def test_one_step_by_hand(decay, epsilon, trust, after, tolerance):
    weight = tf.Variable(np.array([3.0, 4.0]))
    gradient = tf.constant([0.6, 0.8], tf.float64)
    optimizer = LARS(10.0, weight_decay=decay, epsilon=epsilon)
    optimizer.build([weight])
    (found,) = optimizer.trust_ratios([gradient], [weight])
    assert float(found) == pytest.approx(trust, rel=1e-15)
    optimizer.apply_gradients([(gradient, weight)])
    np.testing.assert_allclose(weight.numpy(), after, rtol=0, atol=tolerance)
    step = 10 * trust * (np.array([0.6, 0.8]) + decay * np.array([3.0, 4.0]))
    np.testing.assert_allclose(weight.numpy(), [3, 4] - step, rtol=1e-12)
    # Google's sign: v' = m v - lr trust (g + wd w).
    np.testing.assert_allclose(optimizer.momentums[0].numpy(), -step, rtol=1e-12)


@pytest.mark.parametrize("zero", ["weight", "gradient", "both"])
def test_ratio_is_1_where_a_norm_is_0(zero):
    weight = np.zeros(2) if zero in ("weight", "both") else np.array([3.0, 4.0])
    gradient = np.zeros(2) if zero in ("gradient", "both") else np.array([0.6, 0.8])
    variable = tf.Variable(weight)
    optimizer = LARS(0.5, weight_decay=0.25)
    optimizer.build([variable])
    assert float(optimizer.trust_ratios([tf.constant(gradient)], [variable])[0]) == 1.0
    optimizer.apply_gradients([(tf.constant(gradient), variable)])
    expected = weight - 0.5 * (gradient + 0.25 * weight)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), pytest.param("float32", 2e-6, marks=pytest.mark.long)],
)
def test_many_steps_with_a_changing_rate(nesterov, inside, momentum, dtype, tolerance):
    weights, gradients = problem(dtype)
    options = {"momentum": momentum, "nesterov": nesterov, "eeta": 0.01, "epsilon": 0.5}
    # Rates that float32 holds exactly, since Keras keeps rates in it.
    schedule = GradualWarmup(StepDecay(4.0, [30], 0.125), start=0.5, steps=16)
    rates = [*(0.5 + 3.5 * np.arange(16) / 16), *[4.0] * 14, *[0.5] * 20]
    got = train(
        LARS(
            schedule,
            weight_decay=0.3,
            rate_in_momentum=inside,
            weight_decay_mask=DECAYED,
            trust_mask=TRUSTED,
            **options,
        ),
        weights,
        gradients,
    )

    def expected(**changes):
        arguments = {"decay": 0.3, "inside": inside, "decayed": DECAYED, "trusted": TRUSTED}
        return reference(weights, gradients, rates, **{**arguments, **options, **changes})

    assert got[0].dtype == dtype
    for a, b in zip(got, expected()):
        # Of the size of the weights that never stay where they were.
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
    # What the case is about makes a difference that the tolerance would show.
    changes = [{"decayed": None}, {"trusted": None}, {"epsilon": 0.0}]
    if momentum:
        changes += [{"nesterov": not nesterov}, {"inside": not inside}]
    for change in changes:
        assert distance(got, expected(**change)) > 1e-3


@pytest.mark.parametrize("inside", [True, False])
def test_rates_and_decays_by_factors(inside):
    weights, gradients = problem("float64")
    decayed, factors = [1, 0.25, 0, 0.5, 2], [1, 64, 0.5, 2, 0]
    optimizer = LARS(
        StepDecay(0.25, [30], 0.5),
        weight_decay=0.3,
        eeta=0.01,
        rate_in_momentum=inside,
        weight_decay_mask=decayed,
        rate_factors=factors,
        trust_mask=TRUSTED,
    )
    got = train(optimizer, weights, gradients)
    options = {"decay": 0.3, "eeta": 0.01, "inside": inside, "trusted": TRUSTED}
    rates = [0.25] * 30 + [0.125] * 20
    expected = reference(weights, gradients, rates, decayed=decayed, factors=factors, **options)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())
    np.testing.assert_array_equal(got[-1], weights[-1])
    assert distance(got, reference(weights, gradients, rates, decayed=decayed, **options)) > 1e-3


def test_a_layer_that_was_frozen_needs_a_new_optimizer():
    frozen, last = keras.layers.Dense(3, trainable=False), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), frozen, last])
    optimizer, x = LARS(0.1), np.ones((2, 4), "float32")
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(x, np.ones((2, 2), "float32"), verbose=0)
    frozen.trainable = True
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises((UserError, ValueError), match=r"dense\S*/kernel[\s\S]* new optimizer"):
        model.fit(x, np.ones((2, 2), "float32"), verbose=0)


@pytest.mark.long
def test_resnet50_shaped_variables():
    """50 steps of all 161 variables, in float32; training's tests have replicas and workers."""
    with shape_only():
        model = build("resnet50", 1000, (224, 224, 3))
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    assert len(shapes) == 161
    # A sixteenth of each side, so that NumPy's steps stay short.
    shapes = [tuple(max(1, side // 16) if side > 16 else side for side in s) for s in shapes]
    mask = [role is Role.WEIGHT for role in variable_roles(model)]
    generator = np.random.default_rng(0)

    def normal():
        return [generator.normal(size=shape).astype("float32") for shape in shapes]

    start, gradients = normal(), [normal() for _ in range(50)]
    optimizer = LARS(8.0, weight_decay=1e-4, weight_decay_mask=mask, trust_mask=mask)
    got = train(optimizer, start, gradients)
    expected = reference(
        [own.astype("float64") for own in start],
        [[own.astype("float64") for own in step] for step in gradients],
        [8.0] * 50,
        decay=1e-4,
        decayed=mask,
        trusted=mask,
    )
    for a, b, first in zip(got, expected, start):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1.0, np.abs(b).max()))
        assert np.abs(a - first).max() > 1e-3


def test_norms_are_of_all_gradients_after_clipping():
    """A clipped gradient has the same direction: LARS, whose step has a norm of its own, ignores
    all of it but the decay's part."""
    weight = np.array([3.0, 4.0])
    for clip in (None, 0.5):
        variable = tf.Variable(weight)
        optimizer = LARS(1.0, weight_decay=0.1, eeta=0.1, global_clipnorm=clip)
        optimizer.apply_gradients([(tf.constant([6.0, 8.0], tf.float64), variable)])
        gradient = np.array([6.0, 8.0]) * (1 if clip is None else clip / 10)
        trust = 0.1 * 5 / (np.linalg.norm(gradient) + 0.1 * 5)
        np.testing.assert_allclose(
            variable.numpy(), weight - trust * (gradient + 0.1 * weight), rtol=1e-6
        )


def test_sparse_gradient():
    table = np.arange(1, 9, dtype="float32").reshape(4, 2)
    sparse = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        tf.constant([3, 1, 3]),
        tf.constant([4, 2]),
    )
    dense = np.array([[0, 0], [3, 4], [0, 0], [6, 8]], "float32")
    results = []
    for gradient in (sparse, tf.constant(dense)):
        variable = tf.Variable(table)
        optimizer = LARS(0.5, eeta=0.1)
        for _ in range(3):
            optimizer.apply_gradients([(gradient, variable)])
        results.append(variable.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)
    assert distance(results, [table, table]) > 0.01


# --- Float16


def test_float16_weights_lose_updates_that_a_float32_copy_keeps():
    """Jia et al. 2018 keep a float32 copy of the weights for LARS: here is why."""
    generator = np.random.default_rng(1)
    weights = generator.normal(size=4096)
    gradient = generator.normal(size=4096)

    def moved(dtype):
        variable = tf.Variable(weights.astype(dtype))
        optimizer = LARS(0.1, momentum=0.0, weight_decay=0.0)
        for _ in range(10):
            optimizer.apply_gradients([(tf.constant(gradient, dtype), variable)])
        return variable.numpy() != weights.astype(dtype)

    # Each step is a 10,000th of the weights' norm; float16 resolves a 2,000th.
    assert moved("float16").mean() < 0.5
    assert moved("float32").mean() > 0.999


def test_norms_do_not_overflow_in_float16():
    """The square of a norm above 256 is more than float16 holds."""
    variable = tf.Variable(np.full(100, 100.0, "float16"))
    gradient = tf.constant(np.full(100, 100.0, "float16"))
    optimizer = LARS(1.0, weight_decay=0.0, eeta=0.5)
    optimizer.build([variable])
    assert float(optimizer.trust_ratios([gradient], [variable])[0]) == pytest.approx(0.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_scale_does_not_change_the_step(dynamic):
    results = []
    for scale in (1, 1024):
        variable = tf.Variable([3.0, 4.0])
        optimizer = with_loss_scale(LARS(10.0), 0 if dynamic else scale)
        scaled = scaled_loss(optimizer, tf.constant([0.6, 0.8]))
        with without_all_reduce(optimizer) as update:
            update([scaled], [variable])
        results.append(variable.numpy())
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], [2.97, 3.96], rtol=1e-6)


def test_dynamic_loss_scale_skips_a_step_that_overflows():
    variable = tf.Variable([3.0, 4.0])
    optimizer = keras.mixed_precision.LossScaleOptimizer(LARS(10.0), initial_scale=1024)
    with without_all_reduce(optimizer) as update:
        update([tf.constant([np.inf, 1.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [3.0, 4.0])
    assert float(scaled_loss(optimizer, tf.constant(1.0))) == 512


# --- In a recipe


RUN = SMALL.replace(
    batch_size=2048,
    optimizer="lars",
    nesterov=False,
    warmup="0 epochs",
    lars_eeta=0.02,
    optimizer_epsilon=1e-5,
)


def test_weights_alone_are_scaled_and_decayed():
    model = build_model(RUN)
    optimizer = model.optimizer
    assert type(optimizer) is LARS
    weights = [role is Role.WEIGHT for role in variable_roles(model)]
    assert 0 < sum(weights) < len(weights)
    assert optimizer.trust_mask == optimizer.weight_decay_mask == weights
    assert (optimizer.eeta, optimizer.epsilon, optimizer.rate_in_momentum) == (0.02, 1e-5, True)
    model = build_model(RUN.replace(weight_decay_on="all", rate_in_momentum="no"))
    assert model.optimizer.weight_decay_mask == [True] * len(weights)
    assert model.optimizer.trust_mask == weights
    assert model.optimizer.rate_in_momentum is False


@pytest.mark.parametrize(("batch", "warned"), [(1999, True), (2000, False)])
def test_lars_with_small_batches_warns(batch, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_model(RUN.replace(batch_size=batch))
    assert any("lars is meant for batches of 2000" in str(w.message) for w in caught) == warned


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "weights", "excluded_share"),
    [
        # tests/optimizers/test_roles.py has it of SGD.
        pytest.param("resnet50", 25_502_912, None, marks=pytest.mark.long),
        ("alexnet_bn", None, 0.0002),
    ],
)
def test_what_is_decayed(model, weights, excluded_share):
    """All weights of ResNet-50; all but 0.02% of AlexNet-BN (Jia et al. 2018)."""
    config = RUN.replace(model=model, image_size=224, num_classes=1000)
    network = build_model(config)
    sizes = [v.shape.num_elements() for v in network.trainable_variables]
    decayed = sum(s for s, own in zip(sizes, network.optimizer.weight_decay_mask) if own)
    if weights:
        assert decayed == weights
    if excluded_share:
        assert round(1 - decayed / sum(sizes), 4) == excluded_share


# --- Serialization


def make_all_different():
    return LARS(
        GradualWarmup(StepDecay(0.4, [30, 45], 0.1), start=0.1, steps=20),
        momentum=0.8,
        weight_decay=0.05,
        eeta=0.01,
        epsilon=1e-5,
        nesterov=True,
        rate_in_momentum=False,
        weight_decay_mask=np.array(DECAYED),
        rate_factors=np.arange(5),
        trust_mask=np.array(TRUSTED),
        name="mine",
        global_clipnorm=5.0,
    )


def through_keras(optimizer):
    return keras.optimizers.deserialize(
        json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    )


@pytest.mark.parametrize("make", [make_all_different, LARS])
def test_serialization(make):
    optimizer = make()
    again = through_keras(optimizer)
    assert type(again) is LARS
    assert again.get_config() == optimizer.get_config()
    weights, gradients = problem("float32")
    for a, b in zip(train(again, weights, gradients), train(optimizer, weights, gradients)):
        np.testing.assert_array_equal(a, b)


def test_loading_finds_all_optimizers_once_the_package_is_imported(run_python):
    """Even those that the program has not used: .h5 files and SavedModels name only the class."""
    code = """
        import keras
        import imagenet_fast.optimizers as optimizers

        for name in ("SGD", "LARS", "Muon", "CosineDecay"):
            assert keras.saving.get_registered_object(f"imagenet_fast>{name}"), name
        assert {"LARS", "variable_roles"} <= set(dir(optimizers))
    """
    run_python(["-c", textwrap.dedent(code)])


def test_positional_arguments():
    optimizer = LARS(0.1, 0.8, 0.01, 0.002, 1e-5, True, False, [True, False], [1, 2], [False, True])
    config = optimizer.get_config()
    assert (config["weight_decay_mask"], config["rate_factors"]) == ([1, 0], [1, 2])
    assert config["trust_mask"] == [False, True]


def test_decoupled_weight_decay_is_refused():
    with pytest.raises(UserError, match="LARS has weight decay in its trust ratios"):
        LARS(0.1, decoupled_at_rate=0.1)


def test_config_has_all_options():
    config = make_all_different().get_config()
    assert (config["eeta"], config["epsilon"], config["rate_in_momentum"]) == (0.01, 1e-5, False)
    assert (config["momentum"], config["nesterov"], config["weight_decay"]) == (0.8, True, 0.05)
    assert config["weight_decay_mask"] == DECAYED
    assert config["rate_factors"] == [0, 1, 2, 3, 4]
    assert config["trust_mask"] == TRUSTED


def test_in_a_saved_model_and_a_checkpoint(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    mask = [True, False]
    model.compile(LARS(5.0, weight_decay_mask=mask, trust_mask=mask, eeta=0.01), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model.fit(x, x[:, :3], epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for one, other in zip(model.optimizer.variables, again.optimizer.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    for network in (model, again):
        network.fit(x, x[:, :3], shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6)
