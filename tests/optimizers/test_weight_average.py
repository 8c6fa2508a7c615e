"""The moving average of weights: its values, the exact swap, and evaluation with it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_network import small_network

from imagenet_fast import Config, build_model, export, make_dataset
from imagenet_fast.optimizers import WeightAverage
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir
from imagenet_fast.training.run import with_model

DIGITS = {
    "image_size": 16,
    "train_crop": "none",
    "eval_crop_fraction": 1.0,
    "batch_size": 64,
    "strategy": "one_device",
    "ema_decay": 0.8,
}


def test_values():
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(4.0), tf.Variable(7)]
    average = WeightAverage(variables, 0.75)
    expected = [np.array([1.0, 2.0]), np.array(4.0)]
    for step in range(5):
        for variable in variables[:2]:
            variable.assign(variable * 2 - step)
        average.update()
        expected = [0.75 * e + 0.25 * v.numpy() for e, v in zip(expected, variables)]
    # Whole numbers, as of a random generator's state, have none.
    assert len(average.averages) == 2
    for found, value in zip(average.averages, expected):
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-6)


def test_every_fifth_step_of_an_epoch():
    """Page 2019: .99 ** 5 = .9509900499, after batches 0, 5, .., 95 of 97: 20 times an epoch."""
    variable = tf.Variable(0.0)
    average = WeightAverage([variable], 0.99, every=5)
    variable.assign(1.0)
    average.update(0)
    np.testing.assert_allclose(average.averages[0].numpy(), 1 - 0.9509900499, rtol=1e-6)

    average.restart()
    variable.assign(0.0)
    updates = 0
    update = tf.function(average.update)
    for epoch in range(2):
        for step in tf.range(97, dtype=tf.int64):
            before = average.averages[0].numpy()
            update(step)
            updates += average.averages[0].numpy() != before
        assert updates == 20 * (epoch + 1)
    np.testing.assert_allclose(average.averages[0].numpy(), 0.9509900499**40, rtol=1e-5)


def test_exact_swap():
    generator = np.random.default_rng(0)
    variables = [tf.Variable(generator.normal(size=100).astype("float32")) for _ in range(3)]
    average = WeightAverage(variables, 0.9)
    for variable in variables:
        variable.assign(generator.normal(size=100) * 1e-4)
    average.update()
    before = [v.numpy() for v in variables]
    kept = [v.numpy() for v in average.averages]
    with pytest.raises(RuntimeError, match="inside"), average.in_use():
        for variable, value in zip(variables, kept):
            np.testing.assert_array_equal(variable.numpy(), value)
        raise RuntimeError("inside")
    for variable, value in zip([*variables, *average.averages], [*before, *kept]):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A model after some steps, and where its checkpoint is."""
    config = Config(data_dir=digits, model_dir=str(tmp_path_factory.mktemp("run")), **DIGITS)
    model = build_model(config, model=small_network)
    model.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=5, verbose=0)
    claim_model_dir(with_model(config, small_network), model.labels)
    Checkpoints(model, config).save(5, {})
    return model, config


@pytest.fixture(scope="module")
def plain(trained):
    """The same network with its first weights, without an average."""
    return build_model(trained[1].replace(ema_decay=0.0), model=small_network)


def logits(model, images):
    return model(images, training=False).numpy()


def test_follows_training(trained, plain):
    """The average of the weights that each step of a model without one leaves behind."""
    _, config = trained
    expected = [v.numpy() for v in plain.weights]

    def after_step(batch, logs):
        expected[:] = [0.8 * e + 0.2 * v.numpy() for e, v in zip(expected, plain.weights)]

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=after_step)
    batches = make_dataset(config, "train")
    plain.fit(batches, epochs=1, steps_per_epoch=5, verbose=0, callbacks=[watch])
    model = trained[0]
    with model.averaged_weights():
        found = model.get_weights()
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_evaluation_uses_the_average(trained, plain):
    model, config = trained
    validation = make_dataset(config, "validation")
    before = model.get_weights()
    loss = model.evaluate(validation, verbose=0, return_dict=True)["loss"]
    for a, b in zip(model.get_weights(), before):
        np.testing.assert_array_equal(a, b)
    first = plain.get_weights()
    with model.averaged_weights():
        plain.set_weights(model.get_weights())
    assert plain.evaluate(validation, verbose=0, return_dict=True)["loss"] == pytest.approx(loss)
    plain.set_weights(before)
    other = plain.evaluate(validation, verbose=0, return_dict=True)["loss"]
    assert abs(other - loss) > 1e-4
    plain.set_weights(first)


@pytest.mark.long
def test_prediction_uses_the_average(trained):
    model, config = trained
    images = next(iter(make_dataset(config, "validation")))[0]
    with model.averaged_weights():
        expected = tf.nn.softmax(logits(model, images)).numpy()
        # The average is in use already.
        within = model.predict(images, verbose=0)
    np.testing.assert_allclose(within, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(images, verbose=0), expected, atol=1e-6)
    assert np.abs(expected - tf.nn.softmax(logits(model, images))).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("source", ["config", "model"])
def test_checkpoint_and_export_contain_it(trained, tmp_path, source):
    model, config = trained
    again = build_model(config.replace(seed=1), model=small_network)
    restore_weights(again, config.model_dir)
    images = next(iter(make_dataset(config, "validation")))[0]
    with model.averaged_weights():
        expected = logits(model, images)
    with again.averaged_weights():
        np.testing.assert_array_equal(logits(again, images), expected)
    np.testing.assert_array_equal(logits(again, images), logits(model, images))
    assert np.abs(expected - logits(model, images)).max() > 1e-2

    # A PNG would be compressed as in shards.
    encoded = tf.io.encode_jpeg(images[0], quality=100).numpy()
    pixels = tf.io.decode_jpeg(encoded, dct_method="INTEGER_ACCURATE")
    with model.averaged_weights():
        expected = logits(model, pixels[tf.newaxis])
    probabilities = np.sort(tf.nn.softmax(expected[0]).numpy())[::-1][:5]
    options = {"config": {"model": small_network}, "model": {}}[source]
    exported = export({"config": config, "model": model}[source], tmp_path / "exported", **options)
    served = tf.saved_model.load(exported).signatures["serving_default"]
    answer = served(images=tf.constant([encoded]))["probabilities"][0]
    np.testing.assert_allclose(answer, probabilities, rtol=1e-4, atol=1e-5)
