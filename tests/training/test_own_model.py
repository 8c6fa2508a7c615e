"""Networks of the user: trained, resumed and exported as the package's own are."""

import json
import pathlib
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError, build_model, evaluate, export, make_dataset, train
from imagenet_fast.base.keras_2 import KERAS_2, KERAS_3_16, layers_in, tensorflow_variables
from imagenet_fast.base.option import option_text
from imagenet_fast.layers import (
    BatchNormalization,
    GhostBatchNormalization,
    PixelNormalization,
)
from imagenet_fast.layers.seeds import seed_states
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import build_custom, keras_batch_norms, name_of
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.run import with_model

STEPS = 4
RAW = {"pixel_mean": (0, 0, 0), "pixel_std": (1, 1, 1)}


@pytest.fixture(scope="module")
def config(digits):
    return Config(
        data_dir=digits,
        image_size=8,
        train_crop="none",
        flip=False,
        eval_crop_fraction=1.0,
        batch_size=32,
        rate_scaling="none",
        learning_rate=0.05,
        schedule="constant",
        warmup="0 steps",
        weight_decay=0.0,
        duration=f"{STEPS} steps",
        strategy="one_device",
        examine=False,
        tensorboard=False,
    )


def functional(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(4, 3, use_bias=False)(images)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(images, keras.layers.Dense(num_classes, name="classes")(x))


def sequential(num_classes, image_shape):
    return keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(num_classes, activation="softmax")]
    )


class Subclassed(keras.Model):
    def __init__(self, num_classes, image_shape):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(6, activation="relu")
        self.out = keras.layers.Dense(num_classes)

    def call(self, images):
        return self.out(self.hidden(self.flatten(images)))


class Unseeded(keras.layers.Layer):
    """Draws from Keras' global generator, as ConvNeXt's stochastic depth does."""

    def call(self, values, training=None):
        if training and not KERAS_2:
            values += 0.1 * keras.random.normal(keras.ops.shape(values))
        return values


def random(num_classes, image_shape):
    """With layers that draw random numbers."""
    dropped = keras.Sequential([Unseeded(), keras.layers.Dropout(0.5)])
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, "relu"), dropped]
    return keras.Sequential([keras.Input(image_shape), *layers, keras.layers.Dense(num_classes)])


def trained_by_hand(config, network):
    """Trains a plain Keras model, which returns logits or probabilities, in a loop."""
    normalize = PixelNormalization(config.pixel_mean, config.pixel_std)
    optimizer = keras.optimizers.SGD(config.learning_rate, momentum=0.9, nesterov=True)
    for images, labels, _ in make_dataset(config, "train").take(STEPS):
        with tf.GradientTape() as tape:
            outputs = network(normalize(images), training=True)
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=network.layers[-1].activation is not keras.activations.softmax
            )(labels, outputs)
        gradients = tape.gradient(loss, tensorflow_variables(network.trainable_variables))
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
    return network.get_weights()


def assert_close(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(functional, marks=pytest.mark.long),
        sequential,
        pytest.param(Subclassed, marks=pytest.mark.long),
    ],
)
def test_weights_are_those_of_a_plain_training_loop(config, make):
    model = build_model(config, model=make)
    assert model.config.model == f"{__name__}:{make.__name__}"
    plain = make(10, (8, 8, 3))
    plain(np.zeros((1, 8, 8, 3), "float32"))
    plain.set_weights(network_of(model).get_weights())
    before = model.get_weights()
    model.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=STEPS, verbose=0)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-3
    assert_close(model.get_weights(), trained_by_hand(config, plain))


class Pair(keras.layers.Layer):
    """Two layers, whose weights would fit each other."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(6), keras.layers.Dense(6)

    def call(self, features):
        return self.second(self.first(features))


@pytest.mark.long
def test_a_copy_trains_what_the_model_trains(config):
    """Keras' clone_model would also train the frozen layers inside of others."""
    shape = (8, 8, 3)
    flat, dense = keras.layers.Flatten(), keras.layers.Dense(6)
    backbone, pair = keras.Sequential([keras.Input(shape), flat, dense]), Pair()
    given = keras.Sequential([keras.Input(shape), backbone, pair, keras.layers.Dense(10)])
    backbone.trainable = False
    dense.trainable = True
    pair.first.trainable = False
    model = build_model(config, model=given)
    count = 4 if KERAS_2 else 6  # in Keras 3, a layer may be trained in a frozen model
    assert len(model.trainable_variables) == len(given.trainable_variables) == count
    model.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=STEPS, verbose=0)
    before = given.get_weights()
    expected = trained_by_hand(config, given)
    assert sum(not np.array_equal(*pair) for pair in zip(before, expected)) == count
    assert_close(network_of(model).get_weights(), expected)


# --- Whole runs


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A finished run of a model given in Python, with keras.layers.Dropout and an average."""
    directory = str(tmp_path_factory.mktemp("own") / "run")
    config = config.replace(
        ema_decay=0.5, optimizer="lars", eval_every="2 steps", model_dir=directory
    )
    with pytest.warns(UserWarning, match="lars is meant for"):
        train(config, model=lambda *sizes: random(*sizes))
    return config


@pytest.fixture(scope="module")
def ready(run):
    """A model with the run's weights."""
    model = random(10, (8, 8, 3))
    train(run, model=model)
    return model


def weights(model_dir):
    reader = tf.train.load_checkpoint(str(pathlib.Path(model_dir, "checkpoints")))
    names = reader.get_variable_to_shape_map()
    return {name: reader.get_tensor(name) for name in names if name.startswith("weights/")}


@pytest.mark.long
def test_resumed_to_the_bit(run, tmp_path):
    """Also the random numbers of Keras layers, whose state Keras leaves out of checkpoints."""
    config = run.replace(model_dir=str(tmp_path / "run"))
    for callbacks in ([Stop()], []):
        train(config, model=lambda *sizes: random(*sizes), callbacks=callbacks)
    found, expected = weights(config.model_dir), weights(run.model_dir)
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_model_gets_the_trained_weights(run, ready):
    result = evaluate(run, model=random)
    assert json.loads(pathlib.Path(run.model_dir, "summary.json").read_text())["top1"] == (
        pytest.approx(result["top1"])
    )
    normalize = PixelNormalization(run.pixel_mean, run.pixel_std)
    images, labels = map(
        np.concatenate, zip(*((i, y) for i, y, _ in make_dataset(run, "validation")))
    )
    predicted = ready.predict(normalize(images), verbose=0).argmax(1)
    assert len(labels) == 359
    assert (predicted == labels).mean() == pytest.approx(result["top1"])


@pytest.mark.long
def test_a_model_gets_the_best_weights_that_are_kept(config, tmp_path, capsys):
    """Here those of the first evaluation: then the model gets worse, with a huge learning rate."""
    config = config.replace(
        keep_best=True,
        eval_every="2 steps",
        schedule="piecewise_linear",
        knots_at=("0 steps", "2 steps", "3 steps"),
        knots=(1.0, 1.0, 1e5),
        model_dir=str(tmp_path / "run"),
    )
    model = sequential(10, (8, 8, 3))
    model.build((None, 8, 8, 3))
    model.set_weights([np.zeros_like(own) for own in model.get_weights()])
    summary = train(config, model=model)
    assert (summary["best_step"], summary["steps"]) == (2, STEPS)
    best = build_model(config, model=sequential)
    assert restore_weights(best, config.model_dir, "best").endswith("/best/ckpt-2")
    for found, expected in zip(model.get_weights(), best.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert "only better ones will be kept" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "best")
    train(config, model=model)  # which is finished
    assert "run/best lacks that of the best evaluation, of step 2" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_without_weights_gets_them(config, tmp_path):
    config = config.replace(duration="2 steps", model_dir=str(tmp_path / "run"))
    model = sequential(10, (8, 8, 3))
    assert not model.built
    train(config, model=model)
    last = build_model(config, model=sequential)
    restore_weights(last, config.model_dir)
    assert_close(model.get_weights(), network_of(last).get_weights())


@pytest.mark.long
def test_exported_predictions_are_the_models(run, ready, tmp_path):
    served = tf.saved_model.load(export(run, tmp_path / "exported", model=ready))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), "uint8")
    outputs = served.signatures["pixels"](pixels=tf.constant(pixels))
    normalized = PixelNormalization(run.pixel_mean, run.pixel_std)(pixels)
    expected = tf.nn.softmax(ready(normalized)).numpy()
    np.testing.assert_allclose(outputs["probabilities"], expected, rtol=1e-4, atol=1e-6)
    assert outputs["features"].shape == (5, 8)


def adapted(num_classes, image_shape):
    norm = keras.layers.Normalization()
    network = keras.Sequential(
        [keras.Input(image_shape), norm, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )
    norm.adapt(np.random.default_rng(0).normal(3, 9, (32, *image_shape)))
    return network


def test_adapted_statistics_are_those_of_the_weights(config):
    """Which Keras' Normalization reads only when it is built, adapted or loaded from a file."""
    given = adapted(10, (8, 8, 3))
    images = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), "uint8")
    floats = images.astype("float32")
    model = build_model(config.replace(**RAW), model=given)
    np.testing.assert_allclose(model(images, training=False), given(floats), rtol=1e-4, atol=1e-4)
    # Other ones, as from a checkpoint.
    weights = [np.full_like(weight, 2) for weight in model.get_weights()]
    model.set_weights(weights)
    given.set_weights(weights)
    given.layers[0].finalize_state()
    np.testing.assert_allclose(model(images, training=False), given(floats), rtol=1e-4, atol=1e-3)


def test_functions_make_their_model_and_return_one_tensor(config):
    made = functional(10, (8, 8, 3))
    with pytest.raises(UserError, match="a model that was made before it was called"):
        build_model(config, model=lambda num_classes, image_shape: made)

    def named(num_classes, image_shape):
        images = keras.Input(image_shape)
        return keras.Model(images, {"out": keras.layers.Dense(10)(keras.layers.Flatten()(images))})

    with pytest.raises(UserError, match=r"returns a dict of \(None, 10\), but must return a logit"):
        build_model(config, model=named)


def test_a_run_whose_model_has_no_name_needs_it_again(run):
    recorded = Config.from_json(pathlib.Path(run.model_dir, "config.json").read_text())
    assert recorded.model == "custom"
    with pytest.raises(UserError, match="this run's model is code"):
        evaluate(recorded)


@pytest.mark.long
def test_pixels_as_they_are(config, tmp_path):
    config = config.replace(**RAW)
    model = build_model(config, model=Subclassed)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), "uint8")
    expected = network_of(model)(pixels.astype("float32"))
    np.testing.assert_array_equal(model(pixels), expected)
    # Exported without features, of which a subclassed model shows none.
    signatures = tf.saved_model.load(export(model, tmp_path / "exported")).signatures
    assert sorted(signatures) == ["pixels", "serving_default"]
    outputs = signatures["pixels"](pixels=tf.constant(pixels))
    assert list(outputs) == ["probabilities"]
    np.testing.assert_allclose(outputs["probabilities"], tf.nn.softmax(expected), rtol=1e-4)


# --- What a network must be


@pytest.mark.parametrize("make", [functional, functional(10, (8, 8, 3))])
def test_mixed_precision(config, make):
    model = build_model(config.replace(precision="mixed_bfloat16"), model=make)
    (convolution, *_) = (
        layer for layer in layers_in(model) if isinstance(layer, keras.layers.Conv2D)
    )
    assert convolution.compute_dtype == "bfloat16"
    assert convolution.kernel.dtype == tf.float32
    pixels = np.zeros((2, 8, 8, 3), "uint8")
    assert model(pixels).dtype == tf.float32
    if make is not functional:
        assert_close(network_of(model).get_weights(), make.get_weights())


def test_activity_regularizers_in_mixed_precision(config):
    """Their losses have the layer's dtype, those of weights are float32."""

    def make(num_classes, image_shape):
        regularized = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
        return keras.Sequential(
            [keras.layers.Flatten(), regularized, keras.layers.Dense(num_classes)]
        )

    model = build_model(config.replace(precision="mixed_bfloat16"), model=make)
    loss, *_ = model.train_on_batch(np.zeros((2, 8, 8, 3), "uint8"), np.zeros(2, "int32"))
    assert np.isfinite(loss)


class Measured(keras.layers.Layer):
    """Adds a loss, twice the mean of its input, which is no weight decay."""

    def call(self, values):
        self.add_loss(2 * tf.reduce_mean(values))
        return values


def measured(num_classes, image_shape):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes), Measured()])


# --- Batch norm


def with_batch_norms(num_classes, image_shape):
    images = keras.Input(image_shape)
    inner = keras.Sequential([keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(name="n")])
    x = keras.layers.ReLU()(inner(images))
    options = {"momentum": 0.7, "epsilon": 0.01, "scale": False, "gamma_regularizer": "l2"}
    x = keras.layers.BatchNormalization(**options)(keras.layers.Conv2D(4, 3)(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(x), name="mine")


class OwnNorm(keras.layers.BatchNormalization):
    pass


class InASubclass(Subclassed):
    def __init__(self, num_classes, image_shape):
        super().__init__(num_classes, image_shape)
        self.norm = keras.layers.BatchNormalization()

    def call(self, images):
        return super().call(self.norm(images))


def of_a_subclass(num_classes, image_shape):
    layers = [keras.Input(image_shape), OwnNorm(name="own"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def of_all_replicas(num_classes, image_shape):
    norm = keras.layers.BatchNormalization(synchronized=True)
    layers = [keras.Input(image_shape), norm, keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(num_classes)])


@pytest.mark.parametrize("given", [False, True])
def test_batch_norms_are_replaced(config, given, capsys):
    """By ones with the same configuration, weights and results."""
    model = with_batch_norms(10, (8, 8, 3))
    made = build_model(config, model=model if given else with_batch_norms)
    assert "batch norms (2) became imagenet_fast.layers.BatchN" in capsys.readouterr().err
    network = network_of(made)
    norms = [own for own in layers_in(network) if isinstance(own, BatchNormalization)]
    assert len(norms) == 2 and not keras_batch_norms(network)
    plain = [own for own in layers_in(model) if isinstance(own, keras.layers.BatchNormalization)]
    for norm, other in zip(norms, plain):
        unknown = {"unbiased_variance": False, "dtype": None, "name": None}
        assert {**norm.get_config(), **unknown} == {**other.get_config(), **unknown}
    model.set_weights(network.get_weights())
    made.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=STEPS, verbose=0)
    assert_close(network.get_weights(), trained_by_hand(config, model))


def test_batch_norms_stay_if_that_is_wished(config, capsys):
    model = build_model(
        config.replace(model="custom", fused_batch_norm=False), model=with_batch_norms
    )
    assert len(keras_batch_norms(network_of(model))) == 2
    assert "batch norms" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [with_batch_norms, InASubclass, of_a_subclass])
def test_momentum_and_epsilon_of_batch_norms(config, make, capsys):
    config = config.replace(model="custom")
    build_model(config, model=lambda *sizes: make(*sizes))
    assert "as batch_norm_momentum says" not in capsys.readouterr().err
    other = config.replace(batch_norm_momentum=0.25, batch_norm_epsilon=0.5)
    model = build_model(other, model=lambda *sizes: make(*sizes))
    norms = [o for o in layers_in(model) if isinstance(o, keras.layers.BatchNormalization)]
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(0.25, 0.5)}
    told, former = capsys.readouterr().err, "0.7 and 0.99" if make is with_batch_norms else "0.99"
    count = f"batch norms ({len(norms)}) get"
    assert f"{count} momentum 0.25, as batch_norm_momentum says, in place of {former}\n" in told
    assert f"{count} epsilon 0.5, as batch_norm_epsilon says" in told


def test_a_model_gets_the_epsilon_of_its_trained_weights(config, tmp_path):
    given = with_batch_norms(10, (8, 8, 3))
    config = config.replace(
        model="custom", batch_norm_epsilon=0.5, duration="1 steps", model_dir=str(tmp_path / "run")
    )
    train(config, model=given)
    norms = [o for o in layers_in(given) if isinstance(o, keras.layers.BatchNormalization)]
    assert {(norm.epsilon, norm.momentum) for norm in norms} == {(0.5, 0.7), (0.5, 0.99)}


@pytest.mark.parametrize(
    ("activation", "kept"),
    [
        (keras.layers.Activation("tanh"), 1),
        (keras.layers.Activation("sigmoid"), 1),
        (keras.ops.sigmoid if hasattr(keras, "ops") else keras.layers.Activation("sigmoid"), 1),
        (keras.layers.Activation("relu"), 0),
        (keras.layers.Activation("swish"), 0),
    ],
)
def test_batch_norms_with_an_activation_can_be_evaluated(config, activation, kept, capsys):
    """On CPUs, TensorFlow fuses them with the convolution before."""

    def network(num_classes, image_shape):
        images = keras.Input(image_shape)
        x = keras.layers.Conv2D(4, 3, use_bias=False)(images)
        x = activation(keras.layers.BatchNormalization()(x))
        return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))

    model = build_model(config.replace(model="custom"), model=network)
    images = np.random.RandomState(0).randint(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    evaluated = tf.function(lambda batch: model(batch, training=False), autograph=False)(images)
    np.testing.assert_allclose(evaluated, model(images, training=False), rtol=1e-4, atol=1e-5)
    told = capsys.readouterr().err
    assert ("or come before tanh or sigmoid" in told) == (kept == 1)
    norms = [o for o in layers_in(model) if isinstance(o, keras.layers.BatchNormalization)]
    assert [type(norm) is keras.layers.BatchNormalization for norm in norms] == [kept == 1]


def test_batch_norms_that_cannot_be_replaced(config, capsys):
    build_model(config, model=of_a_subclass)
    told = capsys.readouterr().err
    assert ": batch norms (1) became imagenet_fast" in told
    assert "keeps Keras' batch norms (1, such as own) that are of a class of their own" in told
    build_model(config, model=InASubclass)
    assert (
        "keeps Keras' batch norms (1), because Keras cannot copy it: for speed"
        in capsys.readouterr().err
    )
    ghosts = config.replace(model="custom", batch_norm_batch_size=8)
    with pytest.raises(UserError, match="batch_norm_batch_size=8 does not reach 1 batch norms of"):
        build_model(ghosts, model=of_a_subclass)
    with pytest.raises(UserError, match="does not reach 1 batch norms"):
        build_model(ghosts, model=of_all_replicas)
    assert "Keras cannot copy it (GhostBatchNorm" in capsys.readouterr().err


def test_batch_norms_of_a_shape_only_model_are_replaced(config):
    """As ``plan`` and pipelines make it, also with weights that then have no values."""

    def make(num_classes, image_shape):
        images = keras.Input(image_shape)
        x = keras.layers.Dense(32)(keras.layers.Flatten()(images))  # 6,144 weights
        x = keras.layers.BatchNormalization(epsilon=0.01)(x)
        return keras.Model(images, keras.layers.Dense(num_classes)(x))

    with shape_only():
        network = network_of(build_classifier(config.replace(model="custom"), "ab", make))
    assert not keras_batch_norms(network)
    assert [own.epsilon for own in layers_in(network) if isinstance(own, BatchNormalization)] == [
        0.01
    ]
    assert tuple(network.weights[0].shape) == (192, 32)


def test_ghost_batch_norm(config):
    ghosts = config.replace(model="custom", batch_norm_batch_size=8)
    network = network_of(build_model(ghosts, model=with_batch_norms))
    norms = [own for own in layers_in(network) if isinstance(own, GhostBatchNormalization)]
    assert [norm.ghost_batch_size for norm in norms] == [8, 8]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_losses_of_layers(config, accumulation_steps):
    """Compared with the gradient of the sum, which is known: it is the same for all classes."""
    config = config.replace(accumulation_steps=accumulation_steps)
    model = build_model(config, model=measured)
    (kernel, bias) = network_of(model).trainable_variables
    kernel.assign(tf.zeros_like(kernel))
    before = bias.numpy()
    # Equal logits: the cross-entropy's gradients of the bias are 1/10 less the classes' fractions.
    labels = np.repeat(np.arange(8), 4)
    model.train_on_batch(np.zeros((32, 8, 8, 3), "uint8"), labels)
    gradient = 0.1 - np.bincount(labels, minlength=10) / 32 + 2 / 10
    step = -config.learning_rate * 1.9 * gradient  # Nesterov momentum of 0.9
    np.testing.assert_allclose(bias.numpy() - before, step, rtol=1e-4)


@pytest.mark.parametrize("scale", [1 / 255, 0.5])
def test_a_layer_for_pixels_in_0_to_255_gets_a_warning(config, capsys, scale):
    def make(num_classes, image_shape):
        layers = [keras.layers.Rescaling(scale), keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(num_classes)], name="scaling")

    build_model(config, model=make)
    expected = "model scaling has a Rescaling layer for pixels in 0..255, but its input is norm"
    assert (expected in capsys.readouterr().err) == (scale < 0.01)
    build_model(config.replace(**RAW), model=make)
    assert "Rescaling" not in capsys.readouterr().err


def tf_keras(num_classes, image_shape):
    return type("Functional", (), {"__module__": "tf_keras.src.engine.functional"})()


class TfKerasModel(type(tf_keras(10, (8, 8, 3)))):
    def __call__(self, images):
        raise NotImplementedError


def fails(num_classes, image_shape):
    raise KeyError("filters")


def with_softmax(num_classes, image_shape):
    flat = keras.layers.Flatten()
    return keras.Sequential([flat, keras.layers.Dense(num_classes), keras.layers.Softmax()])


def gray(num_classes, image_shape):
    images = keras.Input((8, 8, 1))
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))


class Scaled(keras.Model):
    """A functional model with a call and an ``__init__`` of its own."""

    def __init__(self, inputs, outputs, factor):
        super().__init__(inputs, outputs)
        self.factor = factor

    def call(self, images, training=None):
        return self.factor * super().call(images, training=training)


def scaled(num_classes, image_shape):
    network = with_batch_norms(num_classes, image_shape)
    return Scaled(network.inputs[0], network.outputs[0], 5.0)


def test_a_call_of_its_own_is_kept_when_batch_norms_could_be_replaced(config, capsys):
    network = network_of(build_model(config, model=scaled))
    assert "keeps Keras' batch norms (2), because Keras cannot copy it" in capsys.readouterr().err
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    graph = keras.Model(network.inputs, network.outputs)
    np.testing.assert_allclose(network(images), 5 * graph(images), rtol=1e-5)


def around_a_subclass():
    images = keras.Input((8, 8, 3))
    return keras.Model(images, Subclassed(10, (8, 8, 3))(images))


def test_initial_weights_are_not_dropped_silently(config):
    config = config.replace(model="resnet8", initial_weights="runs/none")
    with pytest.raises(UserError, match="initial_weights=runs/none is not for a network of your"):
        build_model(config, model=functional)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda num_classes: None, r"such as def build\(num_cl.*, but takes \(num_classes\)$"),
        (
            keras.applications.MobileNetV2,
            r"give --model=keras:MobileNetV2, or .*: return keras.applications.MobileNetV2\(",
        ),
        (fails, r"model failed: KeyError: 'filters' \(\S+test_own_model.py, line \d+\)$"),
        (lambda *_: sys.exit("usage"), "model failed: SystemExit: usage"),
        (tf_keras, r"returned a tf_keras\.src\S+Functional, of tf_keras: .*`import keras`"),
        (TfKerasModel(), r"^model is a tests\S+TfKerasModel, of tf_keras: .*`import keras`"),
        (lambda *_: 3, "returned a builtins.int, and not a Keras Model"),
        (lambda n, shape: functional(9, shape), r"returns \(None, 9\), but .* \(None, 10\)"),
        (with_softmax, "returns probabilities, but must return logits"),
        (functional(10, (9, 9, 3)), r"cannot take images of shape \(8, 8, 3\): ValueError: "),
        (Subclassed(10, (8, 8, 3)), "Subclassed is a subclass of keras.Model.*give a function"),
        (scaled(10, (8, 8, 3)), r"cannot be copied \(Scaled has a call of its own\): give a func"),
        (around_a_subclass(), r"cannot be copied \(Subclassed in it is a subclass of keras.Model"),
        (gray, "cannot take images of shape .8, 8, 3.: ValueError: Input 0 .*of layer"),
        (3, "model is 3, but it must be a function"),
    ],
)  # fmt: skip
def test_refused(model, message):
    with pytest.raises(UserError, match=message):
        build_custom("custom", model, 10, (8, 8, 3))


@pytest.mark.skipif(KERAS_2, reason="Keras 2 returns a tensor")
def test_a_list_of_one_output(config):
    def make(num_classes, image_shape):
        made = functional(num_classes, image_shape)
        return keras.Model(made.inputs, [made.output])

    model = build_model(config, model=make)
    assert model(np.zeros((2, 8, 8, 3), "uint8")).shape == (2, 10)


class Required(Subclassed):
    """As Keras' ``fit`` takes it, but not a call without ``training``."""

    def call(self, images, training):
        factor = 2.0 if training else 1.0
        return factor * super().call(images)


class WithDefault(Required):
    def call(self, images, training=False):
        return super().call(images, training)


@pytest.mark.parametrize("make", [Required, WithDefault])
def test_a_model_whose_call_has_training(config, make, tmp_path):
    if KERAS_3_16 and make is Required:
        with pytest.raises(UserError, match=r"needs training, .* with a default: call\(self, im"):
            build_model(config, model=make)
        return
    model = build_model(config, model=make)
    images = np.full((2, 8, 8, 3), 9, "uint8")
    logits = model(images, training=False).numpy()
    np.testing.assert_allclose(model(images, training=True), 2 * logits, rtol=1e-6)
    loaded = tf.saved_model.load(export(model, tmp_path / "saved"))
    exported = loaded.signatures["pixels"](pixels=tf.constant(images))["probabilities"]
    np.testing.assert_allclose(exported, tf.nn.softmax(logits), atol=1e-6)


def half_precision(num_classes, image_shape):
    made = functional(num_classes, image_shape)
    last = keras.layers.Dense(num_classes, dtype="mixed_float16", name="half")
    return keras.Model(made.inputs, last(made.output), name="mixed")


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_weights_of_other_dtypes_are_for_one_device_without_accumulation(config, dtype):
    def make(num_classes, image_shape):
        made = functional(num_classes, image_shape)
        last = keras.layers.Dense(num_classes, dtype=dtype, name="last")
        return keras.Model(made.inputs, last(made.output))

    assert build_model(config, model=make)
    with pytest.raises(UserError, match=f"has weights in {dtype}, such as last/kernel, whose grad"):
        build_model(config.replace(accumulation_steps=2), model=make)


def test_layers_in_float16_without_a_loss_scale_get_a_warning(config, capsys):
    build_model(config, model=half_precision)
    expected = "model mixed has layers in float16, such as half, but precision=float32 does not"
    assert expected in capsys.readouterr().err
    build_model(config.replace(precision="mixed_float16"), model=half_precision)
    assert "in float16" not in capsys.readouterr().err


def test_a_sigmoid_at_the_end_gets_a_warning(capsys):
    def model(activation):
        flat = keras.layers.Flatten()
        return keras.Sequential([flat, keras.layers.Dense(10, activation=activation)])

    build_custom("custom", lambda *_: model("sigmoid"), 10, (8, 8, 3))
    assert "model ends in a sigmoid, whose outputs the loss takes as" in capsys.readouterr().err
    build_custom("custom:softmax", lambda *_: model("softmax"), 10, (8, 8, 3))
    errors = capsys.readouterr().err
    assert "ends in" not in errors
    assert "model custom:softmax: the softmax at its end is left out, because the" in errors
    inside = [keras.Input((8, 8, 3)), model("sigmoid")]
    build_custom("custom:inside", lambda *_: keras.Sequential(inside), 10, (8, 8, 3))
    assert "inside ends in a sigmoid" in capsys.readouterr().err


def test_layers_that_an_inner_model_shares():
    """The copy trains one kernel where the model has one."""
    shared = keras.layers.Dense(3, name="shared")
    features = keras.Input((3,))
    inner = keras.Model(features, shared(keras.layers.ReLU()(features)))
    images = keras.Input((8, 8, 3))
    pooled = keras.layers.GlobalAveragePooling2D()(images)
    given = keras.Model(images, keras.layers.Dense(10)(shared(inner(shared(pooled)))))
    copy = build_custom("custom", given, 10, (8, 8, 3))
    assert [weight.shape for weight in copy.weights] == [weight.shape for weight in given.weights]
    pixels = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    assert_close([copy(pixels)], [given(pixels)])
    assert_close(copy.get_weights(), given.get_weights())


def made_when_built(num_classes, image_shape):
    """With a Dropout layer that does not exist before the model is built."""

    class Block(keras.layers.Layer):
        def build(self, shape):
            self.dropout = keras.layers.Dropout(0.5)
            super().build(shape)

        def call(self, inputs):
            return self.dropout(inputs)

    return keras.Sequential([keras.layers.Flatten(), Block(), keras.layers.Dense(num_classes)])


def test_random_states_of_layers_made_when_built():
    network = build_custom("custom", made_when_built, 10, (8, 8, 3))
    assert len(seed_states(network)) == 1


def test_a_model_that_has_nothing_to_train(config):
    given = functional(10, (8, 8, 3))
    given.trainable = False
    given.layers[1].trainable = True  # in a frozen model
    with pytest.raises(UserError, match="has nothing to train: all its layers have trainable = F"):
        build_model(config, model=given)


def test_dense_layers_of_images_of_several_sizes():
    def make(num_classes, image_shape):
        images = keras.Input(image_shape)
        x = keras.layers.Flatten()(images)
        return keras.Model(images, keras.layers.Dense(num_classes)(x))

    expected = "model failed for images of any size, as with .*, size_ramp or eval_image_size: Val"
    with pytest.raises(UserError, match=expected):
        build_custom("custom", make, 10, (None, None, 3))


def test_integer_inputs_are_for_pixels(config):
    def make(num_classes, image_shape):
        images = keras.Input(image_shape, dtype="uint8")
        x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
        return keras.Model(images, keras.layers.Dense(num_classes)(x))

    with pytest.raises(UserError, match=r"takes uint8, but .* --pixel_mean"):
        build_model(config, model=make)
    assert build_model(config.replace(**RAW), model=make)


def test_names():
    assert name_of(functional) == f"{__name__}:functional"
    assert name_of(Subclassed.call) == f"{__name__}:Subclassed.call"
    assert name_of(lambda *_: None) == name_of(functional(3, (8, 8, 3))) == "custom"
    assert name_of("my_module:build") == "my_module:build"


MODULE = """
import keras

def build(num_classes, image_shape):
    flat = keras.layers.Flatten()
    return keras.Sequential([keras.Input(image_shape), flat, keras.layers.Dense(num_classes)])
"""


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (MODULE, "{}:build", ""),
        (MODULE, "{}:biuld", "model {}:biuld: {} has no biuld; did you mean 'build'?"),
        (MODULE, "{}.py:build", "on PYTHONPATH; did you mean {}:build?"),
        (MODULE, "no_{}:build", "model no_{}:build: there is no module no_{} in {here}"),
        ("import no_such_module", "{}:build", "importing {} failed: ModuleNotFoundError: No"),
        ("1 / 0", "{}:build", "failed: ZeroDivisionError: division by zero ({here}/{}.py, line 1)"),
        ("exit(3)", "{}:build", "importing {} failed: SystemExit: 3"),
    ],
)  # fmt: skip
def test_modules_of_the_working_directory(text, name, message, tmp_path, monkeypatch, request):
    module = f"module_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name, message = (part.format(module, module, here=tmp_path) for part in (name, message))
    if message:
        with pytest.raises(UserError) as error:
            build_custom(name, None, 10, (8, 8, 3))
        assert message in str(error.value)
    else:
        assert build_custom(name, None, 10, (8, 8, 3)).output_shape == (None, 10)


def test_a_function_by_its_name(config, tmp_path, monkeypatch, capsys):
    """Of the working directory, where another module of the name would come later."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "named_twice.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    model = build_model(config, model="named_twice:build")
    assert model.config.model == "named_twice:build"
    assert f"model named_twice:build: of {tmp_path}/named_twice.py" in capsys.readouterr().err
    assert model.custom() == "named_twice:build"
    initial = config.replace(model="resnet8", initial_weights="runs/none")
    with pytest.raises(UserError, match="is not for a network of your own"):
        build_model(initial, model="named_twice:build")
    assert with_model(initial, "resnet8") == initial


# --- The command line

COMMANDS = """
import json, os, sys
from imagenet_fast import commands

os.chdir(sys.argv[1])
for arguments in json.loads(sys.argv[2]):
    assert commands.run(arguments) == 0
"""


# In the default run, modules of the working directory are imported, above.
@pytest.mark.long
def test_commands_find_a_module_and_two_replicas_train_it(
    config, run_python, tmp_path, monkeypatch
):
    """In the working directory, also when they evaluate and export."""
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "recipe.flags").write_text("--model=resnet8\n--zero_gamma=false\n")
    names = [name for name in config.differences(Config()) if name not in ("duration", "strategy")]
    flags = [f"--{name}={option_text(getattr(config, name))}" for name in names]
    of_run, mine = "--model_dir=run", "--model=my_module:build"
    finished = run_python(
        [
            *("-c", COMMANDS, tmp_path),
            json.dumps(
                [
                    [
                        *("train", "--flagfile=recipe.flags", mine, *flags),
                        *(f"--duration={STEPS} steps", "--strategy=mirrored", "--logical_cpus=2"),
                        of_run,
                    ],
                    ["evaluate", of_run, mine, "--json", "--strategy=one_device"],
                    ["export", of_run, mine, "--saved_model=exported"],
                ]
            ),
        ]
    )
    assert "my_module:build on digits" in finished.stderr
    assert "batch 32 = 2 x 16" in finished.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    result = json.loads(finished.stdout.splitlines()[1])
    assert (summary["replicas"], summary["top1"]) == (2, pytest.approx(result["top1"]))
    assert Config.from_json((tmp_path / "run" / "config.json").read_text()).model == (
        "my_module:build"
    )
    assert (tmp_path / "exported" / "saved_model.pb").exists()
    # The same weights as of one device and a plain loop.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    one = build_model(config.replace(model="my_module:build"))
    plain = build_custom("my_module:build", None, 10, (8, 8, 3))
    plain.set_weights(one.get_weights())
    restore_weights(one, str(tmp_path / "run"))
    assert_close(one.get_weights(), trained_by_hand(config, plain))
