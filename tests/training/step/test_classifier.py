"""The training step against plain Keras, and against gradients taken by hand."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import assert_close, weights_of

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.base.notices import warn_once
from imagenet_fast.layers import Dropout
from imagenet_fast.optimizers.lookahead import Lookahead
from imagenet_fast.optimizers.loss_scale import scaled_loss, with_loss_scale
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.training.step.classifier import Classifier

IMAGES = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("float32")
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])
# Two images that could not be read.
WEIGHTS = np.array([1, 1, 0, 1, 1, 1, 0, 1], "float32")


def layers(batch_norm=False, regularizer=None):
    """Input and logits of a small network: the same weights each time."""
    keras.utils.set_random_seed(1)
    images = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(4, 3, kernel_regularizer=regularizer, name="conv")(images)
    if batch_norm:
        x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Flatten()(keras.layers.Activation("relu")(x))
    return images, keras.layers.Dense(3, dtype="float32", name="logits")(x)


def classifier(optimizer=None, batch_norm=False, regularizer=None, **options):
    model = Classifier(*layers(batch_norm, regularizer), **options)
    model.compile(optimizer or keras.optimizers.SGD(0.5))
    return model


def step(model, images=IMAGES, labels=LABELS, weights=WEIGHTS):
    """Takes one step and returns the metrics."""
    return model.train_on_batch(images, labels, weights, return_dict=True)


def losses_of(model, labels=LABELS):
    """The cross-entropy of each image, in NumPy."""
    logits = model(IMAGES).numpy().astype("float64")
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(8), labels]


# --- One step


def test_step_numbers_need_images_on_the_device():
    with pytest.raises(UserError, match="no train images: build it with the data's Config"):
        classifier().batch({"step": tf.constant(0)}, "train")


def test_same_steps_as_plain_keras():
    ours = classifier(keras.optimizers.SGD(0.1, 0.9), batch_norm=True)
    plain = keras.Model(*layers(batch_norm=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
    assert_close(weights_of(ours), weights_of(plain), 0)
    before = weights_of(ours)
    for _ in range(3):
        found = ours.train_on_batch(IMAGES, LABELS, return_dict=True)
        expected = plain.train_on_batch(IMAGES, LABELS, return_dict=True)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["top1"] == pytest.approx(expected["accuracy"])
        assert (found["examples"], found["skipped"]) == (8, 0)
    assert_close(weights_of(ours), weights_of(plain))
    # All have changed but the convolution's bias, which batch norm takes away again.
    changes = [np.abs(a - b).max() for a, b in zip(weights_of(ours), before)]
    assert sorted(changes)[1] > 1e-3


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_loss_is_the_weighted_sum_divided_by_the_batch(accumulation_steps):
    model = classifier(accumulation_steps=accumulation_steps)
    before = weights_of(model)
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(LABELS, model(IMAGES), True)
        loss = tf.reduce_sum(losses * WEIGHTS) / 8
    gradients = tape.gradient(loss, model.trainable_variables)
    expected_loss = losses_of(model)[WEIGHTS == 1].mean()

    told = step(model)
    assert_close(weights_of(model), [w - 0.5 * g.numpy() for w, g in zip(before, gradients)])
    # What is told is the mean of what counts.
    assert told["loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert (told["examples"], told["skipped"]) == (6, 2)


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.long)])
def test_micro_batches_equal_the_whole_batch(xla):
    whole, parts = classifier(), classifier(accumulation_steps=4, xla=xla)
    for _ in range(3):
        assert step(parts) == pytest.approx(step(whole), rel=1e-5)
    assert_close(weights_of(parts), weights_of(whole))


def test_micro_batches_have_their_own_batch_statistics():
    whole, parts = classifier(batch_norm=True), classifier(batch_norm=True, accumulation_steps=2)
    step(whole)
    step(parts)
    assert np.abs(whole.weights[0].numpy() - parts.weights[0].numpy()).max() > 1e-4


def test_xla_takes_the_same_step():
    plain, compiled = classifier(batch_norm=True), classifier(batch_norm=True, xla=True)
    for _ in range(2):
        assert step(compiled) == pytest.approx(step(plain), rel=1e-5)
    assert_close(weights_of(compiled), weights_of(plain), 1e-5)


def test_fit_traces_a_step_once(monkeypatch):
    model, traced = classifier(keras.optimizers.Adam()), []
    gradients = model.gradients
    monkeypatch.setattr(model, "gradients", lambda data: traced.append(1) or gradients(data))
    for _ in range(2):
        model.fit(IMAGES, LABELS, batch_size=4, verbose=0)
    assert len(traced) == 1


def test_tracing_leaves_layers_unchanged():
    """Neither batch norm's averages nor dropout's count."""
    images = keras.Input((6, 6, 3))
    x = keras.layers.BatchNormalization()(images)
    x = Dropout(0.5)(keras.layers.Flatten()(x))
    model = Classifier(images, keras.layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.0))
    before = model.get_weights()
    with model.preserved_state():
        step(model)
        changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
        assert sum(changed) == 3
    for own, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=pytest.mark.long), 2])
def test_regularization_is_trained_but_not_reported(accumulation_steps):
    strength = 0.3
    regularized = classifier(
        regularizer=keras.regularizers.L2(strength), accumulation_steps=accumulation_steps
    )
    plain = classifier()
    kernel = plain.get_layer("conv").kernel.numpy()
    assert step(regularized)["loss"] == pytest.approx(step(plain)["loss"], rel=1e-5)
    expected = [weight.numpy() for weight in plain.weights]
    expected[0] -= 0.5 * 2 * strength * kernel
    assert_close(weights_of(regularized), expected)


# --- The loss


def identity(**options):
    """A model whose logits are its inputs."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity")(inputs)
    model = Classifier(inputs, outputs, **options)
    model.compile(keras.optimizers.SGD(0.0))
    return model


@pytest.mark.parametrize(
    ("smoothing", "expected"), [(0.0, 0.4076060), (0.1, 0.5076060), (0.2, 0.6076060)]
)
def test_label_smoothing(smoothing, expected):
    model = identity(label_smoothing=smoothing)
    batch = np.array([[2.0, 1.0, 0.0]]), np.array([0])
    assert model.train_on_batch(*batch, return_dict=True)["loss"] == pytest.approx(expected, 1e-6)
    assert model.test_on_batch(*batch, return_dict=True)["loss"] == pytest.approx(expected, 1e-6)


def test_label_smoothing_equals_smooth_targets():
    model = identity(label_smoothing=0.1)
    logits = np.random.default_rng(2).normal(size=(16, 3)).astype("float32")
    labels = np.arange(16) % 3
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    expected = loss(np.eye(3, dtype="float32")[labels], logits)
    told = model.test_on_batch(logits, labels, return_dict=True)
    assert told["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_evaluation_ignores_padding_and_unreadable_images():
    model = classifier(batch_norm=True)
    labels, weights = LABELS.copy(), WEIGHTS.copy()
    labels[5:], weights[5:] = -1, 0
    images = IMAGES.copy()
    images[5:] = 1e6
    told = model.test_on_batch(images, labels, weights, return_dict=True)
    counted = [0, 1, 3, 4]
    assert (told["examples"], told["skipped"]) == (4, 1)
    assert told["loss"] == pytest.approx(losses_of(model)[counted].mean(), rel=1e-5)
    right = model(IMAGES).numpy().argmax(1) == LABELS
    assert told["top1"] == right[counted].mean()
    assert told["top5"] == 1


def test_evaluation_is_the_mean_over_all_batches():
    model = classifier(batch_norm=True)
    told = model.evaluate(IMAGES, LABELS, batch_size=3, verbose=0, return_dict=True)
    assert told["loss"] == pytest.approx(losses_of(model).mean(), rel=1e-5)
    assert told["examples"] == 8


# --- float16


def half_precision(optimizer, **options):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return classifier(optimizer, batch_norm=True, **options)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def scaled(scale=0.0):
    return with_loss_scale(keras.optimizers.SGD(0.5), scale)


def scale_of(model):
    return float(scaled_loss(model.optimizer, tf.constant(1.0)))


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("scale", [pytest.param(512.0, marks=pytest.mark.long), 0.0])
def test_loss_scale_changes_neither_step_nor_metrics(scale, accumulation_steps):
    options = {"batch_norm": True, "accumulation_steps": accumulation_steps}
    plain = classifier(**options)
    half = half_precision(scaled(scale), accumulation_steps=accumulation_steps)
    before = weights_of(plain)
    told, expected = step(half), step(plain)
    assert told["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    assert_close(weights_of(half), weights_of(plain), 5e-3)
    assert np.abs(weights_of(plain)[-2] - before[-2]).max() > 0.1
    assert all(weight.dtype == tf.float32 for weight in half.weights)


def test_step_that_overflows_is_skipped():
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=2.0**30
    )
    half = half_precision(optimizer)
    before = [weight.numpy() for weight in half.trainable_variables]
    told = step(half)
    assert_close([weight.numpy() for weight in half.trainable_variables], before, 0)
    assert np.isfinite(told["loss"])
    assert scale_of(half) == 2.0**29
    while scale_of(half) > 2.0**10:
        scale = scale_of(half)
        step(half)
        if scale_of(half) == scale:  # it fits
            break
    assert np.abs(half.trainable_variables[0].numpy() - before[0]).max() > 1e-4


OVERFLOWS = """
import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.optimizers.loss_scale import scaled_loss
from imagenet_fast.training.step.classifier import Classifier

strategy = make_strategy(Config(strategy="mirrored", logical_cpus=2, batch_size=8))
with strategy.scope():
    images = keras.Input((4,))
    model = Classifier(images, keras.layers.Dense(3)(images))
    sgd = keras.optimizers.SGD(0.5)
    model.compile(keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=8.0))
    model.make_slots()
step = tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))


def copies():
    weights = tensorflow_variables(model.weights)
    return [np.stack([copy.numpy() for copy in weight.values]) for weight in weights]


before = copies()
for infinite_in, expected_scale in [(0, 4), (1, 2), (None, 2)]:
    def part(context):
        infinite = context.replica_id_in_sync_group == infinite_in
        return tf.fill([4, 4], np.inf if infinite else 1.0)

    values = strategy.experimental_distribute_values_from_function(part)
    step(values, tf.constant([0, 1, 2, 0]))
    scale = float(scaled_loss(model.optimizer, tf.constant(1.0)))
    assert scale == expected_scale, (infinite_in, scale)
    for now, then in zip(copies(), before):
        assert np.array_equal(now, then) == (infinite_in is not None), infinite_in
        assert np.isfinite(now).all() and np.array_equal(now[0], now[1])
"""


def test_an_overflow_in_any_replica_skips_the_step_in_all(run_python):
    """Keras' ``fit`` looks at the first replica only."""
    run_python(["-c", OVERFLOWS])


REPLICAS_SUM_ONCE = """
import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.optimizers import SGD
from imagenet_fast.training.step.classifier import Classifier

strategy = make_strategy(Config(strategy="mirrored", logical_cpus=2, batch_size=8))
images = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
labels = np.array([0, 1, 2, 0, 1, 2, 0, 1], "int32")
start = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
names = keras.optimizers
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense():
    inputs = keras.Input((4,))
    model = keras.Sequential([inputs, keras.layers.Dense(3)])
    model.set_weights([start, np.zeros(3, "float32")])
    return inputs, model


def several(kind):
    of_bias, others = names.SGD(0.1), kind(0.5)
    return names.MultiOptimizer(lambda weight: of_bias if "bias" in weight.path else others)


def expected(optimizer):
    _, model = dense()
    for _ in range(3):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(value, weights), weights)
    return model.get_weights()


def ours(make, compiled=None):
    with strategy.scope():
        inputs, network = dense()
        model = Classifier(inputs, network(inputs))
        model.compile((compiled or make)())
        if compiled:
            model.optimizer = make()
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat()
    model.fit(batches, epochs=1, steps_per_epoch=3, verbose=0)
    return model, network.get_weights()


def check(found, reference):
    for one, other in zip(found, reference):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


adam = lambda: names.Adam(0.1)
for make in (adam, lambda: several(names.SGD), lambda: several(SGD)):
    check(ours(make)[1], expected(make()))
scaled = lambda: keras.mixed_precision.LossScaleOptimizer(adam(), initial_scale=8.0)
check(ours(scaled)[1], expected(adam()))
check(ours(adam, lambda: names.SGD(0.5))[1], expected(adam()))  # without compile
# Afterwards an optimizer all-reduces again.
for make in (adam, lambda: SGD(0.5)):
    model, _ = ours(make)
    optimizer = model.optimizer
    with strategy.scope():
        _, network = dense()
        before = network.get_weights()
        plain = keras.Model(model.inputs, model.outputs)
        plain.layers[-1].set_weights(before)
        for variable in optimizer.variables:
            if len(variable.shape) or "iteration" in variable.name:
                variable.assign(keras.ops.zeros_like(variable))
        plain.compile(optimizer, loss)
    plain.fit(images, labels, batch_size=8, epochs=3, verbose=0)
    check(plain.layers[-1].get_weights(), expected(make()))
"""


@pytest.mark.skipif(KERAS_2, reason="Keras 2 has no all-reduce in apply")
def test_gradients_are_all_reduced_once_with_any_optimizer(run_python):
    run_python(["-c", REPLICAS_SUM_ONCE])


# --- fit, predict, compile


@pytest.mark.skipif(KERAS_2, reason="Keras 2 makes variables in the first step")
def test_an_optimizer_made_outside_of_the_strategys_scope_is_refused():
    optimizer = keras.optimizers.Adam(0.1)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = classifier()
    refused = functools.partial(
        pytest.raises, UserError, match="was not made in the scope of the model's strategy"
    )
    once = {"steps_per_epoch": 1, "epochs": 1, "verbose": 0}
    with refused():
        model.compile(optimizer)
    assert model.fit(batches(), **once).history["examples"] == [4]  # with the one before
    model.optimizer = optimizer
    with refused():
        model.fit(batches(), **once)
    model.compile("adam")
    assert model.fit(batches(), **once).history["examples"] == [4]


def test_what_compile_does_not_use_is_said(capsys):
    warn_once.cache_clear()
    classifier().compile("sgd", "mse")
    classifier().compile("sgd", metrics=["accuracy"])
    assert capsys.readouterr().err == (
        "compile: loss and metrics have no effect, because the recipe's are used\n"
    )


def batches():
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).repeat().batch(4)


def test_fit_defaults_to_the_recipes_epochs_and_steps():
    model = classifier()
    model.epochs, model.steps_per_epoch = 2, 3
    history = model.fit(batches(), verbose=0).history
    assert len(history["loss"]) == 2
    assert history["examples"] == [12, 12]
    assert model.optimizer.iterations.numpy() == 6
    history = model.fit(batches(), epochs=1, steps_per_epoch=2, verbose=0).history
    assert history["examples"] == [8]
    assert model.optimizer.iterations.numpy() == 8


def test_fit_of_a_recipe_shorter_than_an_epoch():
    model = classifier()
    model.steps_per_epoch, model.total_steps = 3, 2
    assert model.fit(batches(), verbose=0).history["examples"] == [8]
    assert model.fit(batches(), epochs=1, verbose=0).history["examples"] == [12]


def test_fit_without_a_recipe_trains_for_one_epoch():
    model = classifier()
    history = model.fit(IMAGES, LABELS, batch_size=4, verbose=0).history
    assert history["examples"] == [8]
    assert model.optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32"])
def test_labels_of_any_number_type_and_no_weights(dtype):
    model = classifier()
    expected = losses_of(model).mean()
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS.astype(dtype))).batch(8)
    assert model.evaluate(data, verbose=0, return_dict=True)["loss"] == pytest.approx(expected)


def test_fit_learns():
    model = classifier(batch_norm=True)
    model.fit(batches(), steps_per_epoch=30, verbose=0)
    told = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    assert told["top1"] == 1
    assert told["loss"] < 0.2


def test_fit_takes_several_steps_in_a_call():
    """Keras' own option, which a recipe's optimizer is compiled with again."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2)
    models = [classifier(keras.optimizers.SGD(0.1, 0.9), batch_norm=True) for _ in range(2)]
    models[1].compile(models[1].optimizer, steps_per_execution=3)
    one, several = (model.fit(data, epochs=2, verbose=0).history for model in models)
    assert one == several and one["examples"] == [8, 8]
    assert_close(weights_of(models[0]), weights_of(models[1]), 0)


def test_the_progress_bar_shows_the_final_metrics(capsys):
    model = classifier(keras.optimizers.SGD(0.0))
    told = model.fit(IMAGES, LABELS, batch_size=2, epochs=1, verbose=1).history
    bar = capsys.readouterr().out.split("\r")[-1]
    assert f"top1: {told['top1'][0]:.4f}" in bar and "examples: 8.0000" in bar


def test_finite_data_is_used_to_its_end():
    """The recipe's steps are for data that goes on for ever, as that of make_dataset."""
    model = classifier()
    model.steps_per_epoch = 1
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2)
    options = {"epochs": 1, "verbose": 0}
    for own in (model.fit(IMAGES, LABELS, batch_size=2, **options), model.fit(data, **options)):
        assert own.history["examples"] == [len(IMAGES)]
    assert model.fit(data.repeat(), **options).history["examples"] == [2]


class InParts(keras.utils.Sequence):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return IMAGES[2 * index : 2 * index + 2], LABELS[2 * index : 2 * index + 2]


def test_data_of_unknown_length_is_used_to_its_end():
    model = classifier()
    model.steps_per_epoch = 3
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2)
    for own in (data.filter(lambda *_: True), InParts()):
        assert model.fit(own, epochs=2, verbose=0).history["examples"] == [8, 8]


def test_fit_takes_its_arguments_in_keras_order():
    assert classifier().fit(IMAGES, LABELS, 4, 2, 0).history["examples"] == [8, 8]


def test_predict_gives_probabilities():
    model = classifier()
    probabilities = model.predict(IMAGES, batch_size=3, verbose=0)
    assert probabilities.dtype == np.float32
    exponentials = np.exp(model(IMAGES).numpy())
    expected = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    # Labels and weights may come along.
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, WEIGHTS)).batch(8)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, atol=1e-6)


def test_compile_after_freezing_a_layer():
    """What fine-tuning does."""
    model = classifier()
    step(model)
    model.get_layer("conv").trainable = False
    model.compile(keras.optimizers.SGD(0.5))
    before = weights_of(model)
    step(model)
    changes = [np.abs(a - b).max() for a, b in zip(weights_of(model), before)]
    assert changes[:2] == [0, 0]
    assert min(changes[2:]) > 1e-3


@pytest.mark.long
def test_compile_with_another_optimizer():
    once, twice = classifier(scaled(1024.0)), classifier()
    step(twice)
    twice.set_weights(once.get_weights())
    twice.compile(scaled(1024.0))
    step(once)
    step(twice)
    assert_close(weights_of(twice), weights_of(once))


# --- Slow copies of the weights


def test_weight_average_restarts_its_count_each_epoch():
    model = classifier()
    model.weight_average = WeightAverage(model.weights, 0.5, every=2)
    model.steps_per_epoch = 3
    expected = weights_of(model)
    for number in range(8):
        step(model)
        if number % 3 in (0, 2):
            expected = [0.25 * a + 0.75 * w for a, w in zip(expected, weights_of(model))]
    assert_close([average.numpy() for average in model.weight_average.averages], expected)


def test_lookahead_pulls_the_weights_back():
    model, free = classifier(), classifier()
    model.lookahead = Lookahead(model.weights, 0.5, every=2, total_steps=4)
    start = weights_of(model)
    step(model), step(free)
    assert_close(weights_of(model), weights_of(free), 0)
    step(model), step(free)
    # After step 2 of 4: 0.5 ** 2 * (2 / 4) ** 3.
    keep = 1 / 32
    expected = [keep * s + (1 - keep) * w for s, w in zip(start, weights_of(free))]
    assert_close(weights_of(model), expected)


def with_average(**options):
    model = classifier(batch_norm=True, **options)
    model.weight_average = WeightAverage(model.weights, 0.5)
    return model


def evaluated(model):
    return model.evaluate(IMAGES, LABELS, batch_size=8, verbose=0, return_dict=True)


def test_saved_weights_are_those_evaluated(tmp_path):
    model = with_average()
    for _ in range(3):
        step(model)
    expected = evaluated(model)
    model.save_weights(tmp_path / "model.weights.h5")
    again = with_average()
    step(again)
    again.load_weights(tmp_path / "model.weights.h5")
    assert evaluated(again) == pytest.approx(expected, rel=1e-5)

    model.save(tmp_path / "model.keras")
    network = keras.models.load_model(tmp_path / "model.keras")
    found = tf.nn.softmax(network(IMAGES, training=False))
    assert_close(found, model.predict(IMAGES, verbose=0))


def test_setting_weights_restarts_the_average():
    model, plain = with_average(), classifier(batch_norm=True)
    step(model), step(plain), step(plain)
    model.set_weights(plain.get_weights())
    assert evaluated(model) == pytest.approx(evaluated(plain), rel=1e-5)


def test_keras_backup_without_the_average_is_refused(tmp_path):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(UserError, match="BackupAndRestore does not save the moving average"):
        with_average().fit(IMAGES, LABELS, callbacks=[backup])
    classifier().fit(IMAGES, LABELS, callbacks=[backup], verbose=0)


# --- Unusual data and networks


def test_a_column_of_labels_and_weights():
    """As ``keras.datasets`` has them."""
    rows, columns = classifier(), classifier()
    told = step(columns, labels=LABELS[:, np.newaxis], weights=WEIGHTS[:, np.newaxis])
    assert told == pytest.approx(step(rows), rel=1e-6)
    assert_close(weights_of(columns), weights_of(rows))


def test_labels_that_are_not_class_numbers():
    with pytest.raises(UserError, match=r"labels are class numbers \[batch\], but got \(8, 3\)"):
        step(classifier(), labels=np.eye(3)[LABELS])


def test_weights_of_any_size():
    model = classifier()
    weights = np.array([0.25, 2, 0, 1, 1, 1, 0, 0.5], "float32")
    expected = (losses_of(model) * weights).sum() / weights.sum()
    told = step(model, weights=weights)
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    assert (told["examples"], told["skipped"]) == (weights.sum(), 2)


def test_a_batch_that_cannot_be_split_into_micro_batches():
    message = "6 images cannot be split into accumulation_steps=4 equal micro-batches"
    with pytest.raises(UserError, match=message):
        step(classifier(accumulation_steps=4), IMAGES[:6], LABELS[:6], WEIGHTS[:6])
    # Of an epoch's last batch that is known only when it comes.
    data = tf.data.Dataset.from_tensor_slices((IMAGES[:6], LABELS[:6])).batch(4)
    message = r"(?s)cannot be split into accumulation_steps=4 equal micro-batches.*drop_remainder"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        classifier(accumulation_steps=4).fit(data, verbose=0)


def test_unused_weights():
    images = keras.Input((6, 6, 3))
    x = keras.layers.Dense(4, name="lost")(keras.layers.Flatten()(images))
    model = Classifier(images, keras.layers.Dense(3)(keras.layers.Lambda(tf.stop_gradient)(x)))
    model.compile(keras.optimizers.SGD(0.5))
    with pytest.raises(UserError, match="the loss does not depend on lost/kernel, lost/bias"):
        step(model)
    model.get_layer("lost").trainable = False
    model.compile(keras.optimizers.SGD(0.5))
    step(model)


def test_keras_functions_that_cannot_save_the_model(tmp_path):
    with pytest.raises(UserError, match=r"model\.save"):
        keras.models.save_model(classifier(), tmp_path / "model.keras")


# --- Several views


def test_evaluation_averages_the_logits_of_views():
    model, flipping = classifier(), classifier(views="flip")
    both = [model(images).numpy() for images in (IMAGES, IMAGES[:, :, ::-1])]
    expected = keras.losses.sparse_categorical_crossentropy(LABELS, sum(both) / 2, True)
    told = flipping.evaluate(IMAGES, LABELS, batch_size=8, verbose=0, return_dict=True)
    assert told["loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    predicted = flipping.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(predicted, tf.nn.softmax(sum(both) / 2), rtol=1e-5)


# --- Several replicas


REPLICAS = """
import numpy as np
import tensorflow as tf
import keras
from imagenet_fast import Config, make_strategy
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.training.step.classifier import Classifier

images = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
images[4:] += 3  # the second replica's, so that their statistics differ
labels = np.arange(8) % 3

with make_strategy(Config(logical_cpus=2)).scope():
    inputs = keras.Input((4,))
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    dense = keras.layers.Dense(
        3, kernel_initializer=keras.initializers.RandomNormal(seed=1),
        kernel_regularizer=keras.regularizers.L2(0.5),
    )
    model = Classifier(inputs, dense(norm(inputs)))
    model.compile(keras.optimizers.SGD(1.0))
kernel = dense.kernel.numpy()
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)

def normalized(part):
    return (part - part.mean(0)) / np.sqrt(part.var(0) + 1e-3)

# One step: each replica's own batch norm, the loss over the global batch, regularization once.
history = model.fit(data, epochs=1, verbose=0).history
x = np.concatenate([normalized(images[:4]), normalized(images[4:])])
exponentials = np.exp(x @ kernel)
probabilities = exponentials / exponentials.sum(1, keepdims=True)
gradient = x.T @ (probabilities - np.eye(3)[labels]) / 8 + kernel
np.testing.assert_allclose(dense.kernel.numpy(), kernel - gradient, atol=1e-5)
loss = -np.log(probabilities[np.arange(8), labels]).mean()
np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
assert history["examples"] == [8]

# Evaluation has the mean of their moving averages in both.
told = model.evaluate(data, verbose=0, return_dict=True)
mean = 0.5 * (images[:4].mean(0) + images[4:].mean(0)) / 2
variance = 0.5 + 0.5 * (images[:4].var(0) + images[4:].var(0)) / 2
x = (images - mean) / np.sqrt(variance + 1e-3) * norm.gamma.numpy() + norm.beta.numpy()
logits = x @ dense.kernel.numpy() + dense.bias.numpy()
losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), labels]
np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)
np.testing.assert_allclose(told["loss"], losses.mean(), rtol=1e-4)

# Class weights would have to be mapped over it, which Keras cannot.
distributed = model.distribute_strategy.experimental_distribute_dataset(data)
try:
    model.fit(distributed, class_weight={0: 2.0, 1: 1.0, 2: 1.0})
except UserError as error:
    assert "class_weight does not work with make_dataset's data" in str(error)
else:
    raise AssertionError("class weights were left out")

# Of a last batch that is smaller, replicas get unequal parts: two images and one.
with model.distribute_strategy.scope():
    dense = keras.layers.Dense(3)
    plain = Classifier(inputs, dense(inputs))
    plain.compile(keras.optimizers.SGD(1.0))
kernel = dense.kernel.numpy()
plain.fit(images[:3], labels[:3], batch_size=8, epochs=1, verbose=0)
exponentials = np.exp(images[:3] @ kernel)
probabilities = exponentials / exponentials.sum(1, keepdims=True)
gradient = images[:3].T @ (probabilities - np.eye(3)[labels[:3]]) / 3
np.testing.assert_allclose(dense.kernel.numpy(), kernel - gradient, atol=1e-5)

# Each replica's own averages are as they were.
own = lambda: [part.numpy() for part in model.distribute_strategy.experimental_local_results(
    tensorflow_variables([norm.moving_mean])[0])]
model.fit(data, epochs=1, verbose=0)
before = own()
assert not np.array_equal(*before)
with model.preserved_state():
    model.fit(data, epochs=1, verbose=0)
    assert not np.array_equal(own(), before)
np.testing.assert_array_equal(own(), before)
"""


def test_two_replicas(run_python):
    run_python(["-c", REPLICAS])
