"""Batch norm over groups of replicas against NumPy, and against Keras on one device."""

import pathlib

import grouped_batch_norm_fit_job as fit_job
import grouped_batch_norm_job as job
import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.distribute.groups import consecutive
from imagenet_fast.layers import GroupedBatchNormalization

FOLDER = pathlib.Path(__file__).parent
# Name -> (strategy, logical CPUs, worker processes).
STRATEGIES = {
    "four_devices": ("mirrored", 4, 0),
    "four_workers": ("multi_worker", 0, 4),
}
# In the default run, workers sum over groups in tests/distribute/test_group_sum.py.
EACH = ["four_devices", pytest.param("four_workers", marks=pytest.mark.long)]
# Of what is rounded to the layer's dtype: outputs and their gradients.
ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_python_session):
    """Each strategy's results by name: [replicas, ...]; run when first asked for."""
    found = {}

    def get(name):
        if name not in found:
            kind, logical_cpus, workers = STRATEGIES[name]
            folder = tmp_path_factory.mktemp(name)
            script = FOLDER / "grouped_batch_norm_job.py"
            run_python_session([script, kind, logical_cpus, folder], workers=workers, timeout=600)
            replicas = range(logical_cpus or workers)
            own = [np.load(folder / f"{replica}.npz") for replica in replicas]
            found[name] = {key: np.stack([o[key] for o in own]) for key in own[0]}
        return found[name]

    return get


def reference(replicas, group_size, dtype):
    """Returns what ``one_layer`` must find, [replicas, ...], in float64.

    Gradients of gamma and beta are those of the whole group.
    """
    gamma, beta = job.parameters()
    moving_mean, moving_variance = (
        np.zeros([replicas, job.CHANNELS]),
        np.ones([replicas, job.CHANNELS]),
    )
    expected = {}
    for step, batch in enumerate(job.BATCHES):
        images, upstream = (
            values.numpy().astype("float64") for values in job.problem(replicas, batch, dtype)
        )
        found = {name: [] for name in ("outputs", "d_images", "d_gamma", "d_beta")}
        for group in consecutive(replicas, group_size).members:
            x, dy = images[list(group)], upstream[list(group)]
            axes = (0, 1, 2, 3)
            mean, variance = x.mean(axes), x.var(axes)
            inverse = 1 / np.sqrt(variance + job.EPSILON)
            normalized = (x - mean) * inverse
            d_gamma, d_beta = (dy * normalized).sum(axes), dy.sum(axes)
            count = x.size / job.CHANNELS
            d_x = gamma * inverse * (dy - d_beta / count - normalized * d_gamma / count)
            found["outputs"] += list(gamma * normalized + beta)
            found["d_images"] += list(d_x)
            found["d_gamma"] += [d_gamma] * group_size
            found["d_beta"] += [d_beta] * group_size
            if group_size == 1 and KERAS_2:  # whose layer moves by the unbiased variance
                variance = variance * count / (count - 1)
            for moving, value in ((moving_mean, mean), (moving_variance, variance)):
                moving[list(group)] *= job.MOMENTUM
                moving[list(group)] += (1 - job.MOMENTUM) * value
        found.update(moving_mean=moving_mean.copy(), moving_variance=moving_variance.copy())
        expected.update({f"step{step}_{name}": np.array(v) for name, v in found.items()})
    return expected


def own_results(found, group_size, dtype):
    """The job's results of a group size and dtype, gradients of parameters summed over groups."""
    prefix = f"{group_size}_{dtype}_"
    own = {key[len(prefix) :]: v for key, v in found.items() if key.startswith(prefix)}
    for name in own:
        if name.endswith(("d_gamma", "d_beta")):
            groups = own[name].reshape(-1, group_size, job.CHANNELS)
            own[name] = groups.sum(axis=1).repeat(group_size, axis=0)
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group_size", "dtype"),
    [
        *(("four_devices", *case) for case in job.FEW),
        *(pytest.param("four_workers", *case, marks=pytest.mark.long) for case in job.ALL),
    ],
)
def test_one_batch_norm_over_the_images_of_the_group(results, name, group_size, dtype):
    own = own_results(results(name), group_size, dtype)
    expected = reference(len(own["step0_outputs"]), group_size, dtype)
    assert own.keys() == expected.keys() and len(own) == 12
    for key, values in expected.items():
        rounding = ROUNDING[dtype] if key.endswith(("outputs", "d_images")) else 0
        np.testing.assert_allclose(own[key], values, rtol=rounding or 1e-5, atol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 4])
def test_statistics_of_another_group_differ(results, other):
    own = own_results(results("four_devices"), 2, "float32")
    expected = reference(4, other, "float32")
    for key in own.keys() - {"step0_d_beta", "step1_d_beta"}:
        assert np.abs(own[key] - expected[key]).max() > 0.05, key


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_all_members_keep_the_same_statistics(results, name):
    own = own_results(results(name), 2, "float32")
    for key in ("step1_moving_mean", "step1_moving_variance"):
        np.testing.assert_array_equal(own[key][0::2], own[key][1::2])
        assert np.abs(own[key][0] - own[key][2]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_large_means(results, name):
    """Of the inputs' own squares, float32 would leave none of the variance."""
    found = results(name)["far_moving_variance"]
    images = (1000 + job.problem(len(found), job.BATCHES[0])[0]).numpy().astype("float64")
    variances = images.reshape(2, -1, job.CHANNELS).var(axis=1).repeat(2, axis=0)
    expected = job.MOMENTUM + (1 - job.MOMENTUM) * variances
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_layers_of_one_name_and_layers_used_twice(results, name):
    own = results(name)
    images, upstream = job.problem(len(own["shared_outputs"]), job.BATCHES[0])
    gamma, beta = job.parameters()
    layers = [
        keras.layers.BatchNormalization(
            epsilon=job.EPSILON,
            gamma_initializer=keras.initializers.Constant(gamma),
            beta_initializer=keras.initializers.Constant(beta),
        )
        for _ in range(2)
    ]
    for first in range(0, len(images), 2):
        group = slice(first, first + 2)
        shape = images[group].shape
        outputs, (d_images,) = job.gradients_of(
            lambda x: job.shared(*layers, x),
            tf.reshape(images[group], [-1, *shape[2:]]),
            tf.reshape(upstream[group], [-1, *shape[2:]]),
            [],
        )
        for found, expected in (
            (own["shared_outputs"], outputs),
            (own["shared_d_images"], d_images),
        ):
            expected = tf.reshape(expected, shape)
            np.testing.assert_allclose(found[group], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "logical_cpus", "workers"),
    [
        ("mirrored", 2, 0),
        pytest.param(
            "multi_worker",
            0,
            2,
            marks=pytest.mark.skipif(
                not KERAS_2, reason="Keras 3's fit does not run under MultiWorkerMirroredStrategy"
            ),
        ),
    ],
)
def test_custom_model_under_fit(tmp_path, run_python, kind, logical_cpus, workers):
    out, path = tmp_path / "weights.npz", tmp_path / "model.keras"
    script = FOLDER / "grouped_batch_norm_fit_job.py"
    run_python([script, kind, logical_cpus, out, path], workers=workers)
    found = np.load(out)

    model = fit_job.build(keras.layers.BatchNormalization)
    before = [variable.numpy() for variable in model.weights]
    model.fit(fit_job.dataset(), epochs=2, verbose=0)
    for i, variable in enumerate(model.weights):
        np.testing.assert_allclose(found[f"arr_{i}"], variable.numpy(), rtol=1e-5, atol=1e-5)
        assert np.abs(variable.numpy() - before[i]).max() > 1e-3
    loss = model.evaluate(fit_job.dataset(), verbose=0)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)

    # What was saved is used without any strategy.
    inputs = fit_job.arrays()[0]
    expected = model.predict(inputs, verbose=0)
    loaded = keras.models.load_model(path)
    norms = [x for x in loaded.layers if isinstance(x, GroupedBatchNormalization)]
    assert [norm.group_size for norm in norms] == [None, None]
    answers = loaded.predict(inputs, verbose=0)
    np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("group_size", [None, 1, 4])
def test_equals_keras_layer_on_one_device(group_size):
    images, _ = job.problem(1, 6)
    layers = [
        GroupedBatchNormalization(group_size=group_size, momentum=0.8, name="norm"),
        keras.layers.BatchNormalization(momentum=0.8, name="norm"),
    ]
    found = [layer(images[0], training=True) for layer in layers]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    for own, other in zip(layers[0].weights, layers[1].weights):
        np.testing.assert_allclose(own, other, rtol=1e-6)
        assert own.name == other.name


def test_options_are_kept():
    layer = GroupedBatchNormalization(
        axis=1, group_size=4, momentum=0.9, epsilon=1e-5, gamma_initializer="zeros", name="norm"
    )
    again = GroupedBatchNormalization.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.group_size, again.momentum, again.name) == (4, 0.9, "norm")
    assert keras.layers.deserialize(keras.layers.serialize(layer)).group_size == 4


@pytest.mark.parametrize("group_size", [0, -2])
def test_group_size_must_be_positive(group_size):
    with pytest.raises(UserError, match=f"group_size is {group_size}, but must be positive"):
        GroupedBatchNormalization(group_size=group_size)


@pytest.mark.parametrize(
    "options",
    [{"synchronized": True}, {"fused": True}, {"renorm": True}, {"virtual_batch_size": 4}],
    ids=lambda options: next(iter(options)),
)
def test_conflicting_options(options):
    with pytest.raises(UserError, match=f"has no {next(iter(options))}: see group_size"):
        GroupedBatchNormalization(**options)


ON_TWO_DEVICES = """
import keras, numpy as np, pytest, tensorflow as tf
from imagenet_fast import Config, UserError, make_strategy
from imagenet_fast.layers import GroupedBatchNormalization

strategy = make_strategy(Config(logical_cpus=2, batch_size=2))

# A group that does not divide the replicas.
with strategy.scope(), pytest.raises(UserError, match="2 replicas .* of 4; possible sizes: 1, 2"):
    keras.Sequential([keras.Input([3]), GroupedBatchNormalization(group_size=4)])

# Channels that come first, and masks: what is masked does not count, as in Keras' layer.
def run(layer, *arguments):
    def own():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return layer(*(a[replica] for a in arguments[:1]), training=True, **{
            "mask": a[replica] for a in arguments[1:]})
    return tf.concat(strategy.experimental_local_results(
        tf.function(lambda: strategy.run(own))()), 0)

x = tf.random.stateless_normal([2, 4, 3, 5], [1, 2]) + tf.reshape([0.0, 3.0], [2, 1, 1, 1])
with strategy.scope():
    layer = GroupedBatchNormalization(axis=1)
    layer.build([None, 3, 5])
other = keras.layers.BatchNormalization(axis=1)
np.testing.assert_allclose(run(layer, x), other(tf.reshape(x, [8, 3, 5]), training=True), atol=1e-5)

mask = tf.constant(np.random.default_rng(0).random([2, 4, 3]) < 0.6)
with strategy.scope():
    layer = GroupedBatchNormalization()
    layer.build([None, 3, 5])
other = keras.layers.BatchNormalization()
expected = other(tf.reshape(x, [8, 3, 5]), training=True, mask=tf.reshape(mask, [8, 3]))
np.testing.assert_allclose(run(layer, x, mask), expected, atol=1e-5)

# A replica without images: the others have the statistics of theirs.
with strategy.scope():
    layer = GroupedBatchNormalization()
    layer.build([None, 5])
def uneven():
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return layer(x[0, : 4 * (1 - replica), 0], training=True)
outputs = strategy.experimental_local_results(tf.function(lambda: strategy.run(uneven))())
expected = keras.layers.BatchNormalization()(x[0, :, 0], training=True)
assert outputs[1].shape == (0, 5)
np.testing.assert_allclose(outputs[0], expected, atol=1e-5)
"""


@pytest.mark.slow
def test_two_devices(run_python):
    run_python(["-c", ON_TWO_DEVICES])
