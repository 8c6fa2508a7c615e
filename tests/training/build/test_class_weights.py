"""Weights of classes in the loss, against Keras' and scikit-learn's."""

import json

import keras
import numpy as np
import pytest
from model_weights import assert_close, weights_of
from sklearn.utils.class_weight import compute_class_weight
from small_network import small_network

from imagenet_fast import Config, UserError, build_model, make_dataset, train
from imagenet_fast.data.info import DatasetInfo, SplitInfo
from imagenet_fast.training.build.model import make_class_weights
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.losses import image_losses

LABELS = np.random.default_rng(0).choice(4, 96, p=[0.6, 0.3, 0.07, 0.03])
IMAGES = np.random.default_rng(1).normal(size=(96, 8, 8, 3)).astype("float32")
WEIGHTS = {0: 0.25, 1: 1.0, 2: 3.5, 3: 7.0}


def info(counts):
    train = SplitInfo((), (), 0, sum(counts), class_counts=tuple(counts))
    return DatasetInfo("animals", tuple("abcd"), 0, {"train": train})


def test_balanced_weights_are_scikit_learns():
    found = make_class_weights(Config(class_weights="balanced"), info(np.bincount(LABELS)))
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[LABELS]).mean() == pytest.approx(1)


def test_a_class_without_images_has_a_weight():
    found = make_class_weights(Config(class_weights="balanced"), info([2, 2, 0, 4]))
    assert np.isfinite(found).all()


def test_data_without_counts():
    with pytest.raises(UserError, match="needs the number of images of each class"):
        make_class_weights(Config(class_weights="balanced"), info([]))
    assert make_class_weights(Config(), info([])) is None


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_steps_are_those_of_keras_class_weight(accumulation_steps):
    keras.utils.set_random_seed(0)
    network = small_network(4, (8, 8, 3))
    plain = keras.models.clone_model(network)
    plain.set_weights(network.get_weights())
    for layer in (*network.layers, *plain.layers):  # micro-batches have statistics of their own
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    ours = Classifier(network.inputs, network.outputs[0], accumulation_steps=accumulation_steps)
    ours.class_weights = np.array(list(WEIGHTS.values()))
    ours.compile(keras.optimizers.SGD(0.1, 0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    for first in range(0, 96, 24):
        part = slice(first, first + 24)
        found = ours.train_on_batch(IMAGES[part], LABELS[part], return_dict=True)["loss"]
        expected = plain.train_on_batch(IMAGES[part], LABELS[part], class_weight=WEIGHTS)
        assert found == pytest.approx(expected, rel=1e-6)
    assert_close(weights_of(ours), weights_of(plain), 1e-6)
    # Evaluation counts each image alike.
    told = ours.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)["loss"]
    assert told == pytest.approx(plain.evaluate(IMAGES, LABELS, verbose=0), rel=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
def test_of_mixed_images_each_label_has_its_weight(loss):
    logits = np.random.default_rng(2).normal(size=(6, 4)).astype("float32")
    own, partner = np.array([0, 1, 2, 3, 0, -1]), np.array([3, 3, 1, 0, 0, 2])
    fractions = np.linspace(0, 1, 6, dtype="float32")
    values = np.array(list(WEIGHTS.values()))
    found = image_losses(logits, own, partner, fractions, loss=loss, class_weights=values)
    of_own, of_partner = (image_losses(logits, labels, loss=loss) for labels in (own, partner))
    expected = fractions * values[own.clip(0)] * of_own
    expected += (1 - fractions) * values[partner] * of_partner
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_run_with_both_and_its_resumption(digits, tmp_path, capsys):
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps({"3": 2.5}))
    config = Config(
        data_dir=digits,
        model_dir=str(tmp_path / "run"),
        image_size=16,
        batch_size=64,
        duration="3 steps",
        eval_every="100 epochs",
        warmup="0 steps",
        train_crop="none",
        strategy="one_device",
        class_weights=str(weights),
        sampling="balanced",
        examine=False,
        tensorboard=False,
    )
    train(config, model=small_network)
    told = capsys.readouterr().err
    assert "; class weights from 1 (0) to 2.5 (3); classes sampled: balanced" in told
    recorded = json.loads((tmp_path / "run" / "class_values.json").read_text())
    assert recorded["class_weights"]["3"] == 2.5 and recorded["class_weights"]["4"] == 1
    assert recorded["sampling"]["4"] == pytest.approx(0.1)
    weights.unlink()  # The run has its values.
    train(config.replace(duration="4 steps"), model=small_network)
    with pytest.raises(UserError, match=r"weights\.json cannot be read: No such file"):
        train(config.replace(model_dir=str(tmp_path / "other")), model=small_network)
    weights.write_text(json.dumps({"3": 3}))
    message = "class_weights gives 3 to class '3', but gave 2.5 when the run in .* began"
    with pytest.raises(UserError, match=message):
        train(config.replace(duration="5 steps"), model=small_network)


def test_keras_own_argument_is_refused_with_what_to_write(digits):
    config = Config(data_dir=digits, image_size=16, batch_size=64, strategy="one_device")
    model = build_model(config, model=small_network)
    with pytest.raises(UserError, match=r"config.replace\(class_weights='balanced'\)"):
        model.fit(make_dataset(config, "train"), class_weight={0: 2.0})
