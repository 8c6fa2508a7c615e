"""Ghost batch norm against NumPy, and against Keras' layer on each group."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import BatchNormalization, GhostBatchNormalization

CHANNELS = 5
MOMENTUM = 0.8
EPSILON = 1e-3
GAMMA = np.linspace(0.5, 1.5, CHANNELS)
BETA = np.linspace(-1, 1, CHANNELS)
OPTIONS = {
    "momentum": MOMENTUM,
    "epsilon": EPSILON,
    "gamma_initializer": keras.initializers.Constant(GAMMA),
    "beta_initializer": keras.initializers.Constant(BETA),
}
# Of what is rounded to the compute dtype.
ROUNDING = {"float64": 0, "float32": 0, "mixed_bfloat16": 2**-8, "mixed_float16": 2**-11}
# Of statistics and arithmetic.
PRECISION = {"float64": 1e-12}


def norm(size, **options):
    return GhostBatchNormalization(ghost_batch_size=size, **{**OPTIONS, **options})


def problem(shape, policy="float32", seed=0):
    """Returns images and the gradients of their outputs, in the policy's compute dtype."""
    generator = np.random.default_rng(seed)
    # Images differ in more than noise, so that wrong groups show.
    offset = generator.normal(size=(shape[0], *[1] * (len(shape) - 2), shape[-1]))
    dtype = keras.mixed_precision.Policy(policy).compute_dtype
    return [
        tf.cast(tf.constant(values), dtype)
        for values in (offset + generator.normal(size=shape), generator.normal(size=shape))
    ]


def reference(images, upstream, size):
    """Returns outputs, gradients, and each group's mean and unbiased variance, in float64."""
    images, upstream = (np.asarray(tf.cast(v, tf.float64)) for v in (images, upstream))
    groups = max(len(images) // size, 1)
    axes = tuple(range(images.ndim - 1))
    outputs, d_images = np.empty_like(images), np.empty_like(images)
    d_gamma, d_beta = np.zeros(CHANNELS), np.zeros(CHANNELS)
    means, variances = [], []
    for group in range(groups):
        own = slice(group, None, groups)
        x, d = images[own], upstream[own]
        mean, variance = x.mean(axes), x.var(axes)
        means.append(mean)
        variances.append(x.var(axes, ddof=1))
        unit = (x - mean) / np.sqrt(variance + EPSILON)
        outputs[own] = unit * GAMMA + BETA
        d_images[own] = (
            GAMMA / np.sqrt(variance + EPSILON) * (d - d.mean(axes) - unit * (d * unit).mean(axes))
        )
        d_gamma += (d * unit).sum(axes)
        d_beta += d.sum(axes)
    return {
        "outputs": outputs,
        "d_images": d_images,
        "d_gamma": d_gamma,
        "d_beta": d_beta,
        "means": np.stack(means),
        "variances": np.stack(variances),
    }


def step_of(layer, jit=False, signature=None):
    """Returns a function of images and upstream gradients that trains and differentiates."""

    @tf.function(jit_compile=jit, input_signature=signature)
    def step(images, upstream):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=True)
        gradients = tape.gradient(outputs, [images, layer.gamma, layer.beta], upstream)
        return dict(zip(("outputs", "d_images", "d_gamma", "d_beta"), (outputs, *gradients)))

    return step


def check(found, expected, policy="float32"):
    precision = PRECISION.get(policy, 1e-5)
    for name, rounding in {
        "outputs": ROUNDING[policy],
        "d_images": ROUNDING[policy],
        "d_gamma": 0,
        "d_beta": 0,
    }.items():
        np.testing.assert_allclose(
            tf.cast(found[name], tf.float64),
            expected[name],
            rtol=rounding + precision,
            atol=10 * precision,
            err_msg=name,
        )


SHAPES = ((12, 3, 2, CHANNELS), (12, CHANNELS), (12, 7, CHANNELS))


def case(shape, policy, jit):
    """More than one difference from the first shape in float32 without XLA is long."""
    differences = (shape != SHAPES[0]) + (policy != "float32") + jit
    return pytest.param(shape, policy, jit, marks=pytest.mark.long if differences > 1 else ())


@pytest.mark.parametrize(
    ("shape", "policy", "jit"),
    [case(*parts) for parts in itertools.product(SHAPES, ROUNDING, (False, True))],
)
def test_matches_numpy(shape, policy, jit):
    images, upstream = problem(shape, policy)
    layer = norm(4, dtype=policy)
    layer.build(shape)
    found = step_of(layer, jit)(images, upstream)
    assert found["outputs"].dtype == images.dtype
    assert found["outputs"].shape == images.shape
    expected = reference(images, upstream, 4)
    check(found, expected, policy)

    # Statistics are those of the images as they are given: not rounded, even in half precision.
    # Keras takes 1 - momentum in float32.
    precision = max(PRECISION.get(policy, 1e-5), 1e-7)
    moving_mean = (1 - MOMENTUM) * expected["means"].mean(0)
    moving_variance = MOMENTUM + (1 - MOMENTUM) * expected["variances"].mean(0)
    np.testing.assert_allclose(layer.moving_mean, moving_mean, atol=precision)
    np.testing.assert_allclose(layer.moving_variance, moving_variance, rtol=precision)


@pytest.mark.parametrize("jit", [False, True], ids=["ops", "xla"])
def test_large_means(jit):
    shape = (12, 3, 2, CHANNELS)
    images, upstream = problem(shape)
    images += 1000
    layer = norm(4, moving_mean_initializer=keras.initializers.Constant(1000.5))
    layer.build(shape)
    found = step_of(layer, jit)(images, upstream)
    variances = reference(images, upstream, 4)["variances"]
    expected = MOMENTUM + (1 - MOMENTUM) * variances.mean(0)
    np.testing.assert_allclose(layer.moving_variance, expected, rtol=1e-5)
    # Keras' kernel multiplies by the scale before it takes away the mean.
    outputs = reference(images, upstream, 4)["outputs"]
    np.testing.assert_allclose(found["outputs"], outputs, atol=1e-3)


@pytest.mark.parametrize("jit", [False, True], ids=["ops", "xla"])
def test_matches_a_loop_of_keras_layers(jit):
    shape, size = (12, 4, 4, CHANNELS), 3
    images, upstream = problem(shape)
    layer = norm(size)
    layer.build(shape)
    found = step_of(layer, jit)(images, upstream)

    other = keras.layers.BatchNormalization(**OPTIONS)
    with tf.GradientTape() as tape:
        tape.watch(images)
        groups = [other(images[group::4], training=True) for group in range(4)]
        # Image n is the n // 4-th of group n % 4.
        outputs = tf.stack([groups[n % 4][n // 4] for n in range(12)])
    gradients = tape.gradient(outputs, [images, other.gamma, other.beta], upstream)
    for name, expected in zip(("outputs", "d_images", "d_gamma", "d_beta"), (outputs, *gradients)):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True], ids=["ops", "xla"])
def test_kernel_without_xla_and_arithmetic_with_it(jit):
    layer = norm(4)
    layer.build([12, 3, 2, CHANNELS])
    kernels = []

    @tf.function(jit_compile=jit)
    def call(images):
        outputs = layer(images, training=True)
        kernels.extend(
            operation.type
            for operation in outputs.graph.get_operations()
            if "BatchNorm" in operation.type
        )
        return outputs

    call(problem([12, 3, 2, CHANNELS])[0])
    assert kernels == ([] if jit else ["FusedBatchNormV3"])


def test_gradients_match_finite_differences():
    images, upstream = problem((6, 2, CHANNELS), "float64")
    layer = norm(2, dtype="float64")
    layer.build(images.shape)
    exact, numerical = tf.test.compute_gradient(
        lambda x: tf.reduce_sum(layer(x, training=True) * upstream), [images], delta=1e-5
    )
    np.testing.assert_allclose(exact[0], numerical[0], rtol=1e-6, atol=1e-8)


def test_groups_are_strided():
    images, _ = problem((12, 2, 2, CHANNELS))
    layer = norm(4)
    before = layer(images, training=True).numpy()
    changed = images.numpy()
    changed[1] += np.random.default_rng(1).normal(size=changed[1].shape)
    differences = np.abs(layer(changed, training=True).numpy() - before).max(axis=(1, 2, 3))
    assert np.flatnonzero(differences).tolist() == [1, 4, 7, 10]


def test_moving_averages_are_the_mean_of_the_groups():
    """Page keeps averages for each group, and takes their mean when evaluation begins."""
    layer = norm(4)
    means, variances = np.zeros([3, CHANNELS]), np.ones([3, CHANNELS])
    for step in range(6):
        images, upstream = problem((12, 3, 3, CHANNELS), seed=step)
        layer(images, training=True)
        groups = reference(images, upstream, 4)
        means = MOMENTUM * means + (1 - MOMENTUM) * groups["means"]
        variances = MOMENTUM * variances + (1 - MOMENTUM) * groups["variances"]
        if step == 3:  # an evaluation, after which all groups go on from the mean
            means[:], variances[:] = means.mean(0), variances.mean(0)
    assert np.ptp(means, axis=0).min() > 0.01
    np.testing.assert_allclose(layer.moving_mean, means.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, variances.mean(0), rtol=1e-5)


@pytest.mark.parametrize("images", [4, 3])
def test_one_group_equals_keras_layer(images):
    inputs, upstream = problem((images, 3, 3, CHANNELS))
    found = []
    for layer in (norm(4), BatchNormalization(unbiased_variance=True, **OPTIONS)):
        layer.build(inputs.shape)
        results = step_of(layer)(inputs, upstream)
        found.append([*results.values(), *layer.weights])
    for own, other in zip(*found):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "jit", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ops", "xla"]
)
def test_batches_of_any_number_of_groups(jit):
    layer = norm(4)
    layer.build([None, 3, 2, CHANNELS])
    signature = [tf.TensorSpec([None, None, 2, CHANNELS])] * 2
    step = step_of(layer, jit, signature)
    for shape in ((12, 3, 2, CHANNELS), (8, 5, 2, CHANNELS), (4, 3, 2, CHANNELS)):
        images, upstream = problem(shape)
        check(step(images, upstream), reference(images, upstream, 4))


def test_groups_that_do_not_divide_the_batch():
    images, upstream = problem((10, 2, 2, CHANNELS))
    layer = norm(4, name="ghost")
    words = "ghost: groups of 4 images do not divide the batch; .* images in the batch .*:"
    with pytest.raises(UserError, match=f"{words} 10"):
        layer(images, training=True)
    assert layer(images, training=False).shape == images.shape

    step = step_of(layer, signature=[tf.TensorSpec([None, 2, 2, CHANNELS])] * 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        step(images, upstream)


def test_evaluation_is_that_of_keras_layer():
    images, _ = problem((10, 3, 2, CHANNELS))
    layer, other = norm(4), keras.layers.BatchNormalization(**OPTIONS)
    for each in (layer, other):
        each.build(images.shape)
        each.moving_mean.assign(BETA + 1)
        each.moving_variance.assign(GAMMA + 1)
    expected = other(images, training=False)
    found = layer(images, training=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(layer(images), found)
    layer.trainable = False
    np.testing.assert_array_equal(layer(images, training=True), found)
    np.testing.assert_array_equal(layer.moving_mean, other.moving_mean)


@pytest.mark.parametrize("policy", ["float32", "float64"])
def test_without_scale_and_center(policy):
    images, upstream = problem((12, 3, 2, CHANNELS), policy)
    layer = norm(4, scale=False, center=False, dtype=policy)
    outputs = layer(images, training=True)
    assert layer.trainable_variables == []
    expected = (reference(images, upstream, 4)["outputs"] - BETA) / GAMMA
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True], ids=["ops", "xla"])
def test_constant_images_are_normalized_to_beta(jit):
    images, upstream = problem((12, 3, 2, CHANNELS))
    layer = norm(4)
    layer.build(images.shape)
    found = step_of(layer, jit)(tf.fill(images.shape, 3.7), upstream)
    np.testing.assert_allclose(found["outputs"], np.broadcast_to(BETA, images.shape), atol=1e-4)
    assert np.isfinite(found["d_images"]).all()


def model(layer):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.Conv2D(CHANNELS, 3, use_bias=False),
            layer,
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def fitted(layer, **options):
    """Returns a model after an epoch of three batches of 12 images, and its weights before."""
    generator = np.random.default_rng(4)
    images = generator.normal(1, 2, size=(36, 4, 4, 3)).astype("float32")
    made = model(layer)
    made.compile(keras.optimizers.SGD(0.05), "mse", **options)
    before = made.get_weights()
    targets = images.mean(axis=(1, 2, 3))[:, np.newaxis]
    made.fit(images, targets, batch_size=12, shuffle=False, verbose=0)
    return made, before


@pytest.mark.long
def test_under_fit_and_xla():
    plain, before = fitted(norm(4))
    for first, last in zip(before, plain.get_weights()):
        assert np.abs(first - last).max() > 1e-3
    compiled, _ = fitted(norm(4), jit_compile=True)
    keras_model, _ = fitted(BatchNormalization(unbiased_variance=True, **OPTIONS))
    one_group, _ = fitted(norm(12))
    for found, expected in ((compiled, plain), (one_group, keras_model)):
        for own, other in zip(found.get_weights(), expected.get_weights()):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    differences = zip(plain.get_weights(), one_group.get_weights())
    assert max(np.abs(own - other).max() for own, other in differences) > 1e-2


def test_a_fixed_batch_size_for_evaluation():
    """Keras builds a model in no known mode: groups need not divide the batch."""
    inputs = keras.Input((2, 2, CHANNELS), batch_size=10)
    made = keras.Model(inputs, norm(4)(inputs))
    assert made(problem(inputs.shape)[0], training=False).shape == inputs.shape


def test_saving(tmp_path):
    made, _ = fitted(norm(4, name="ghost"))
    made.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.get_layer("ghost").ghost_batch_size == 4
    images = np.random.default_rng(5).normal(size=(12, 4, 4, 3)).astype("float32")
    for training in (False, True):
        expected = made(images, training=training)
        np.testing.assert_allclose(again(images, training=training), expected, rtol=1e-6)


def test_options_are_kept():
    layer = norm(4, scale=False, name="ghost")
    layer.build([None, 3, 3, CHANNELS])
    for again in (
        GhostBatchNormalization.from_config(layer.get_config()),
        keras.layers.deserialize(keras.layers.serialize(layer)),
    ):
        assert again.get_config() == layer.get_config()
        assert (again.ghost_batch_size, again.momentum, again.scale) == (4, MOMENTUM, False)
        if not again.built:  # from the configuration alone
            again.build([None, 3, 3, CHANNELS])
        assert len(again.weights) == len(layer.weights)


@pytest.mark.parametrize("size", [0, -4])
def test_size_must_be_positive(size):
    with pytest.raises(UserError, match=f"ghost_batch_size is {size}, but must be positive"):
        norm(size)


@pytest.mark.parametrize(
    "options",
    [
        {"synchronized": True},
        {"fused": True},
        {"renorm": True},
        {"virtual_batch_size": 4},
        {"adjustment": lambda shape: (1, 0)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_conflicting_options(options):
    with pytest.raises(UserError, match=f"has no {next(iter(options))}: see ghost_batch_size"):
        norm(4, **options)


@pytest.mark.parametrize("axis", [1, -2])
def test_channels_must_come_last(axis):
    with pytest.raises(UserError, match="channels must come last: axis=-1"):
        GhostBatchNormalization(axis, ghost_batch_size=4).build([None, 3, 3, CHANNELS])


def test_masks():
    with pytest.raises(UserError, match="does not support masks"):
        norm(4)(np.ones([4, 2, CHANNELS]), mask=tf.ones([4, 2], tf.bool))


ON_TWO_DEVICES = """
import numpy as np, tensorflow as tf
from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.one_call import local_values
from imagenet_fast.layers import GhostBatchNormalization

strategy = make_strategy(Config(logical_cpus=2, batch_size=2))
x = tf.random.stateless_normal([2, 8, 3, 3, 5], [1, 2]) + tf.reshape([0.0, 3.0], [2, 1, 1, 1, 1])
with strategy.scope():
    layer = GhostBatchNormalization(ghost_batch_size=4)
    layer.build([None, 3, 3, 5])

def run(layer, images):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(images, training=True) ** 3)
    averages = local_values([layer.moving_mean, layer.moving_variance])
    return tape.gradient(loss, layer.trainable_variables), averages

# The second replica has images in the first step only.
def own(count):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return run(layer, x[replica, : tf.where(replica == 0, 8, count)])

step = tf.function(lambda count: strategy.run(own, args=(count,)))
others = [GhostBatchNormalization(ghost_batch_size=4) for _ in range(2)]
for count in (8, 0):
    gradients, averages = step(count)
    for replica, other in enumerate(others):
        images = x[replica, : 8 if replica == 0 else count]
        if len(images):
            expected = run(other, images)
            for found, value in zip(gradients, expected[0]):
                np.testing.assert_allclose(found.values[replica], value, rtol=1e-4, atol=1e-3)
        for found, value in zip(averages, (other.moving_mean, other.moving_variance)):
            np.testing.assert_allclose(found.values[replica], value, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
def test_two_devices_keep_their_own_statistics(run_python):
    run_python(["-c", ON_TWO_DEVICES])
