"""Training on the images with the highest loss, against NumPy."""

import functools
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import assert_close, weights_of
from small_config import SMALL

from imagenet_fast import UserError, build_model, models
from imagenet_fast.optimizers import SGD, PiecewiseLinear
from imagenet_fast.optimizers.schedules import EveryNthStep
from imagenet_fast.training.build.selection import build_proxy_network, check_selection
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.losses import image_losses
from imagenet_fast.training.step.selection import Proxy, Selection, hardest

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(5, 12, 2, 2, 3)).astype("float32")
LABELS = np.arange(12) % 3
# Two images that could not be read.
WEIGHTS = np.float32([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1])


def layers(seed=1, batch_norm=False):
    keras.utils.set_random_seed(seed)
    images = keras.Input((2, 2, 3))
    x = keras.layers.Flatten()(images)
    if batch_norm:
        x = keras.layers.BatchNormalization(name="norm")(x)
    return images, keras.layers.Dense(3, use_bias=False, dtype="float32", name="logits")(x)


def classifier(batch_norm=False, proxy=None, **options):
    selection = Selection(0.5, proxy)
    model = Classifier(*layers(batch_norm=batch_norm), selection=selection, **options)
    model.compile(keras.optimizers.SGD(0.5))
    return model


def with_proxy(every=2, **options):
    schedule = EveryNthStep(PiecewiseLinear([0, 8], [0.4, 0.0]), every)
    losses = functools.partial(image_losses, label_smoothing=0.1)
    proxy = Proxy(keras.Model(*layers(seed=2)), SGD(schedule, 0.5), losses, every)
    return classifier(label_smoothing=0.1, proxy=proxy, **options)


def weights_of_proxy(model):
    return weights_of(model.selection.proxy.network)


def step(model, number=0):
    model.reset_metrics()
    return model.train_on_batch(IMAGES[number], LABELS, WEIGHTS, return_dict=True)


# --- In NumPy


def losses_and_errors(kernel, images, smoothing=0.0):
    logits = images.reshape(len(images), -1).astype("float64") @ kernel
    soft = (1 - smoothing) * np.eye(3)[LABELS[: len(images)]] + smoothing / 3
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -(soft * np.log(probabilities)).sum(axis=1), probabilities - soft


def highest(losses, count=6):
    """The places of the images with the highest loss among those that can be read."""
    order = [i for i in np.argsort(losses) if WEIGHTS[i]]
    return sorted(order[-count:])


def gradient(kernel, images, places, smoothing=0.0):
    """Of the mean loss of some images."""
    _, errors = losses_and_errors(kernel, images, smoothing)
    x = images.reshape(len(images), -1)
    return x[places].T @ errors[places] / len(places)


# --- The network itself


def test_places_of_the_highest_losses():
    losses = tf.constant([3.0, 1, 9, 5, 2, 4])
    weights = tf.constant([1.0, 1, 0, 1, 1, 1])
    assert hardest(losses, weights, 0.5).numpy().tolist() == [0, 3, 5]
    assert hardest(losses, tf.ones(6), 1 / 6).numpy().tolist() == [2]
    assert hardest(losses, weights, 0.01).numpy().tolist() == [3]
    assert hardest(losses * np.nan, weights, 5 / 6).numpy().tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    "options", [{}, {"accumulation_steps": 2}, {"xla": True, "accumulation_steps": 3}], ids=str
)
def test_a_step_is_that_of_the_images_with_the_highest_loss(options):
    model = classifier(**options)
    (kernel,) = weights_of(model)
    losses, _ = losses_and_errors(kernel, IMAGES[0])
    places = highest(losses)
    assert places != list(range(6))
    found = step(model)
    assert found["loss"] == pytest.approx(losses[places].mean(), rel=1e-5)
    assert (found["examples"], found["skipped"]) == (6, 2)
    assert_close(weights_of(model), [kernel - 0.5 * gradient(kernel, IMAGES[0], places)], 1e-5)


def test_batch_norm_has_the_statistics_of_these_images_only():
    model = classifier(batch_norm=True)
    states = model.get_layer("norm").moving_mean
    x = IMAGES[0].reshape(12, -1)
    normalized = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)
    losses, _ = losses_and_errors(model.get_layer("logits").kernel.numpy(), normalized)
    step(model)
    np.testing.assert_allclose(states, 0.01 * x[highest(losses)].mean(axis=0), atol=1e-6)
    assert np.abs(states - 0.01 * x.mean(axis=0)).max() > 1e-4


def test_evaluation_is_of_all_images():
    model = classifier()
    losses, _ = losses_and_errors(weights_of(model)[0], IMAGES[0])
    found = model.test_on_batch(IMAGES[0], LABELS, return_dict=True)
    assert (found["loss"], found["examples"]) == (pytest.approx(losses.mean(), rel=1e-5), 12)


REPLICAS = """
import numpy as np
import tensorflow as tf
import keras
from imagenet_fast import Config, make_strategy
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.selection import Selection

images = np.random.default_rng(3).normal(size=(8, 2, 2, 3)).astype("float32")
labels = np.arange(8) % 3
keras.utils.set_random_seed(1)
with make_strategy(Config(logical_cpus=2)).scope():
    inputs = keras.Input((2, 2, 3))
    dense = keras.layers.Dense(3, use_bias=False)
    model = Classifier(inputs, dense(keras.layers.Flatten()(inputs)), selection=Selection(0.5))
    model.compile(keras.optimizers.SGD(0.5))
kernel = dense.kernel.numpy().astype("float64")
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
found = model.fit(data, epochs=1, verbose=0).history["loss"][0]

x = images.reshape(8, -1)
odds = np.exp(x @ kernel)
errors = odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[labels]
losses = -np.log((odds / odds.sum(axis=1, keepdims=True))[np.arange(8), labels])
# Of each replica's own half.
halves = losses.reshape(2, 4).argsort(axis=1)[:, 2:]
places = [*halves[0], *(4 + halves[1])]
assert set(places) != set(np.argsort(losses)[4:])
np.testing.assert_allclose(found, losses[places].mean(), rtol=1e-5)
expected = kernel - 0.5 * x[places].T @ errors[places] / 4
np.testing.assert_allclose(dense.kernel.numpy(), expected, atol=1e-5)
"""


@pytest.mark.long
def test_each_replica_selects_from_its_part():
    subprocess.run([sys.executable, "-c", REPLICAS], check=True)


# --- A proxy


def in_numpy(main, proxy, steps, every=2):
    """airbench96_faster: the proxy selects, and is updated in some of the steps."""
    buffer = np.zeros_like(proxy)
    for number in range(steps):
        images = IMAGES[number]
        places = highest(losses_and_errors(proxy, images, 0.1)[0])
        if number % every == 0:
            buffer = 0.5 * buffer + gradient(proxy, images, places, 0.1)
            proxy = proxy - 0.4 * (1 - number / 8) * buffer
        main = main - 0.5 * gradient(main, images, places, 0.1)
    return [main, proxy]


@pytest.mark.parametrize("xla", [False, True])
def test_a_proxy_selects_and_is_trained(xla):
    model = with_proxy(xla=xla)
    (main,), (proxy,) = weights_of(model), weights_of_proxy(model)
    for number in range(5):
        step(model, number)
    found = [*weights_of(model), *weights_of_proxy(model)]
    assert_close(found, in_numpy(main, proxy, 5), 1e-5)
    for other in (in_numpy(main, proxy, 5, every=1), in_numpy(main, main, 5)):
        assert max(np.abs(a - b).max() for a, b in zip(found, other)) > 1e-3
    # It is no part of the model.
    assert len(model.weights) == 1


def test_a_resumed_run_has_the_proxys_state(tmp_path):
    options = SMALL.replace(model_dir=str(tmp_path))
    run, resumed = with_proxy(), with_proxy()
    run.make_slots()
    for number in range(3):
        step(run, number)
    Checkpoints(run, options).save(3, {})
    assert Checkpoints(resumed, options).restore() == {}
    for number in (3, 4):
        assert step(run, number) == step(resumed, number)
    assert_close(weights_of_proxy(resumed), weights_of_proxy(run), 0)
    assert_close(weights_of(resumed), weights_of(run), 0)


@pytest.mark.long
def test_width_of_the_proxy():
    options = {"proxy_model": "airbench96_proxy", "select_by_loss": 0.5, "image_size": 32}
    config = SMALL.replace(model="airbench96", **options)
    published = build_proxy_network(config, 10).trainable_variables
    assert sum(int(np.prod(weights.shape)) for weights in published) == 146_112
    narrow = build_proxy_network(config.replace(proxy_width=4), 10)
    expected = models.build("airbench96_proxy", 10, (32, 32, 3), width=4)
    assert narrow.count_params() == expected.count_params()


@pytest.mark.long
def test_a_built_model_with_a_proxy():
    options = {"width": 2, "proxy_width": 2, "proxy_every": 2, "precision": "mixed_float16"}
    config = SMALL.replace(
        model="airbench94", proxy_model="airbench96_proxy", select_by_loss=0.25, **options
    )
    model = build_model(config)
    before = weights_of_proxy(model)
    images = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), np.uint8)
    found = model.train_on_batch(images, np.arange(32) % 10, return_dict=True)
    assert found["examples"] == 8
    assert any((a != b).any() for a, b in zip(weights_of_proxy(model), before))
    whitening = model.selection.proxy.network.get_layer("airbench96_proxy").get_layer("whitening")
    assert np.abs(whitening.kernel - np.round(whitening.kernel)).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "replicas", "message"),
    [
        ({"accumulation_steps": 16}, 1, "selects 8 of a replica's 32 images, which accum"),
        ({"batch_norm_batch_size": 16}, 1, "batches of two sizes: drop one of them"),
        ({"proxy_model": "resnet8"}, 2, "proxy_model is for one device, but there are 2 replic"),
    ],
)
def test_what_cannot_be_selected(changes, replicas, message):
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas)
    with pytest.raises(UserError, match=message):
        config = SMALL.replace(select_by_loss=0.25, **changes)
        check_selection(Run(config, None, strategy))


def test_pipelines_do_not_select():
    with pytest.raises(UserError, match="pipeline_stages does not work with select_by_loss"):
        build_model(SMALL.replace(select_by_loss=0.5, pipeline_stages=2, strategy="auto"))


def test_a_mirrored_strategy_of_one_replica_has_no_proxy():
    config = SMALL.replace(select_by_loss=0.25, proxy_model="resnet8")
    with pytest.raises(UserError, match="proxy_model is for strategy=one_device, not for Mirr"):
        check_selection(Run(config, None, tf.distribute.MirroredStrategy(["CPU:0"])))
