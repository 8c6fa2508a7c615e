"""Training that starts from weights of before."""

import dataclasses
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import Config, UserError, build_model, export, make_dataset, models, train
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.layers import Dropout
from imagenet_fast.models import network_of
from imagenet_fast.training.build import fine_tune
from imagenet_fast.training.build.fine_tune import freeze
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import CONFIG_FILE, claim_model_dir

# Those of synthetic data.
CLASSES = tuple(map(str, range(10)))
HEAD = ("logits/kernel", "logits/bias")


def values(model):
    return {name_of(variable): variable.numpy() for variable in network_of(model).variables}


def assert_same(found, expected, but=()):
    assert found.keys() == expected.keys()
    differing = [name for name in found if not np.array_equal(found[name], expected[name])]
    assert sorted(differing) == sorted(but)


def make_run(directory, **changes):
    """Writes a run whose weights no seed gives, and returns its model."""
    config = SMALL.replace(model_dir=str(directory), **changes)
    model = build_classifier(config, CLASSES)
    model.compile(optimizer="sgd")
    random = np.random.RandomState(0)
    for variable in model.weights:
        variable.assign(random.uniform(0.5, 1.0, variable.shape))
    claim_model_dir(config, CLASSES)
    Checkpoints(model, config).save(1, {})
    return model


@dataclasses.dataclass
class Source:
    path: str
    values: dict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return Source(str(directory), values(make_run(directory)))


@pytest.fixture(scope="module", params=["run", pytest.param("export", marks=pytest.mark.long)])
def source(request, run, tmp_path_factory):
    """A run, or what was exported of it."""
    if request.param == "run":
        return run
    exported = tmp_path_factory.mktemp("exported") / "model"
    return Source(export(SMALL.replace(model_dir=run.path), exported), run.values)


def test_initial_weights_are_those_of_the_source(source, capfd):
    model = build_model(SMALL.replace(initial_weights=source.path))
    assert_same(values(model), source.values)
    expected = f"initial weights: those of {source.path}, including the classification head"
    assert expected in capfd.readouterr().err


def test_other_classes_get_a_new_head(source, capfd):
    model = build_model(SMALL.replace(initial_weights=source.path, num_classes=7))
    found = values(model)
    fresh = values(build_model(SMALL.replace(num_classes=7)))
    assert_same(found, {**source.values, **{name: fresh[name] for name in HEAD}})
    assert "except the classification head" in capfd.readouterr().err


def test_initial_weights_of_a_keras_file_are_averages_with_a_new_head(tmp_path, capfd):
    """The file has no class names."""
    before = make_run(tmp_path / "run", ema_decay=0.9)
    file = str(tmp_path / "model.keras")
    before.save(file)
    with before.averaged_weights():
        expected = values(before)
    found = values(build_model(SMALL.replace(initial_weights=file)))
    fresh = values(build_model(SMALL))
    assert_same(found, {**expected, **{name: fresh[name] for name in HEAD}})
    assert f"those of {file}, except the classification head" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"model\.keras holds another network than resnet14"):
        build_model(SMALL.replace(initial_weights=file, model="resnet14"))


def test_keras_file_that_would_run_code(tmp_path):
    file = tmp_path / "model.keras"
    keras.Sequential([keras.Input([3]), keras.layers.Lambda(lambda x: x)]).save(file)
    with pytest.raises(UserError, match="could run any code"):
        build_model(SMALL.replace(initial_weights=str(file)))


@pytest.mark.long
def test_head_is_found_before_a_scale(tmp_path):
    before = values(make_run(tmp_path, model="resnet9"))
    config = SMALL.replace(model="resnet9", num_classes=7)
    fresh = values(build_model(config))
    found = values(build_model(config.replace(initial_weights=str(tmp_path))))
    assert_same(found, {**before, HEAD[0]: fresh[HEAD[0]]})


@pytest.mark.long
def test_equally_many_other_classes_get_a_new_head(tmp_path):
    labels = tuple(f"kind {i}" for i in range(10))
    config = SMALL.replace(model_dir=str(tmp_path))
    model = build_classifier(config, labels)
    model.compile(optimizer="sgd")
    claim_model_dir(config, labels)
    Checkpoints(model, config).save(1, {})
    before = values(model)
    after = values(build_model(SMALL.replace(initial_weights=str(tmp_path), seed=1)))
    kernels = [name for name in after if name.endswith("kernel") and name not in HEAD]
    assert len(kernels) > 5
    for name in kernels:
        np.testing.assert_array_equal(after[name], before[name])
    assert not np.array_equal(after[HEAD[0]], before[HEAD[0]])


@pytest.mark.long
def test_initial_weights_whatever_the_precision_and_devices(run):
    config = SMALL.replace(
        initial_weights=run.path, precision="mixed_bfloat16", batch_size=64, accumulation_steps=2
    )
    assert_same(values(build_model(config)), run.values)


@pytest.mark.long
def test_averaged_weights_are_loaded_into_weights_and_average(tmp_path):
    before = make_run(tmp_path, ema_decay=0.9)
    with before.averaged_weights():
        averaged = values(before)
    assert not np.array_equal(averaged[HEAD[0]], values(before)[HEAD[0]])
    model = build_model(SMALL.replace(initial_weights=str(tmp_path), ema_decay=0.5))
    assert_same(values(model), averaged)
    with model.averaged_weights():
        assert_same(values(model), averaged)


def test_dropout_has_no_weights(tmp_path):
    inputs = keras.Input([3])
    network = keras.Model(inputs, keras.layers.Dense(2, name="logits")(Dropout(0.5)(inputs)))
    weights = fine_tune._by_layer(fine_tune._named(network.variables))
    assert len(network.variables) == 3 and weights.keys() == {"logits"}
    weights["logits"]["bias"] += 1
    fine_tune._set(network, weights, tmp_path, with_head=True)
    np.testing.assert_array_equal(network.get_layer("logits").bias, [1, 1])


@pytest.mark.long
def test_dropout_has_no_weights_in_a_run_and_an_export(tmp_path):
    """An export is without what dropout keeps for its random numbers."""
    config = SMALL.replace(model="alexnet_bn", image_size=64, model_dir=str(tmp_path / "run"))
    before = values(make_run(config.model_dir, model="alexnet_bn", image_size=64))
    exported = export(config, tmp_path / "exported")
    for source in (config.model_dir, exported):
        found = values(build_model(config.replace(initial_weights=source, model_dir="")))
        weights = {name: value for name, value in found.items() if "dropout" not in name}
        assert len(weights) < len(before)
        assert_same(weights, {name: before[name] for name in weights})


@pytest.mark.long
def test_initial_weights_of_a_pipeline_run_need_no_pipeline(tmp_path):
    before = values(make_run(tmp_path))
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "pipeline_stages": 2}))
    assert_same(values(build_model(SMALL.replace(initial_weights=str(tmp_path)))), before)


@pytest.mark.long
def test_a_run_resumes_without_its_initial_weights(run, tmp_path):
    """Its checkpoint has all of them."""
    given = tmp_path / "given"
    shutil.copytree(run.path, given)
    config = SMALL.replace(
        initial_weights=str(given),
        model_dir=str(tmp_path / "run"),
        duration="2 steps",
        examine=False,
        tensorboard=False,
    )
    trained = train(config)
    shutil.rmtree(given)
    assert train(config)["steps"] == trained["steps"] == 2
    with pytest.raises(UserError, match="given does not exist: train that run first"):
        train(config.replace(model_dir=str(tmp_path / "another")))


@pytest.mark.parametrize(
    "through",
    [
        pytest.param("stem", marks=pytest.mark.long),
        "stage1",
        pytest.param("stage3", marks=pytest.mark.long),
    ],
)
def test_frozen_layers_and_their_batch_norm_are_unchanged(run, through):
    config = SMALL.replace(initial_weights=run.path, freeze_through=through, duration="2 steps")
    model = build_model(config)
    before = values(model)
    model.fit(make_dataset(config, "train"), steps_per_epoch=2, epochs=1, verbose=0)
    after = values(model)
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    parts = ["stem", "stage1", "stage2", "stage3"]
    frozen = tuple(f"{part}_" for part in parts[: parts.index(through) + 1])
    assert changed == {name for name in before if not name.startswith(frozen)}
    assert not any(name_of(v).startswith(frozen) for v in model.trainable_variables)


@pytest.mark.long
def test_frozen_run_is_evaluated_and_exported_like_any_other(run, tmp_path):
    config = SMALL.replace(initial_weights=run.path, freeze_through="stage2")
    model = build_model(config)
    assert export(model, tmp_path / "exported")


@pytest.mark.parametrize("through", ["stage4", "stag", "block1"])
def test_unknown_layers_are_named_with_those_that_exist(through):
    network = models.build("resnet8", 10, (16, 16, 3))
    with pytest.raises(UserError, match=r"stem, stage1, stage2, stage3"):
        freeze(network, through)


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(UserError, match="leaves nothing of resnet8 to train"):
        freeze(models.build("resnet8", 10, (16, 16, 3)), "logits")


def test_alexnet_is_frozen_by_the_names_of_its_layers():
    network = models.build("alexnet_bn", 10, (64, 64, 3))
    freeze(network, "pool2")
    trained = {name_of(variable).split("/")[0] for variable in network.trainable_variables}
    assert trained == {"conv3", "bn3", "conv4", "bn4", "conv5", "bn5", "fc6", "fc7", "logits"}


def test_random_weights_are_not_frozen():
    with pytest.raises(UserError, match="give --initial_weights"):
        Config(freeze_through="stem")


def test_path_without_weights_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} is neither the model_dir of a trained run"):
        build_model(SMALL.replace(initial_weights=str(tmp_path)))
    missing = tmp_path / "nowhere"
    with pytest.raises(UserError, match=f"{missing} does not exist: train that run first, or give"):
        build_model(SMALL.replace(initial_weights=str(missing)))


@pytest.mark.long
def test_another_programs_savedmodel_is_named(tmp_path):
    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    tf.saved_model.save(network, str(tmp_path / "other"))
    with pytest.raises(UserError, match="is not a SavedModel that `export` or tf_keras wrote"):
        build_model(SMALL.replace(initial_weights=str(tmp_path / "other")))


def test_another_networks_weights_change_nothing(run):
    config = SMALL.replace(initial_weights=run.path, model="resnet14")
    with pytest.raises(UserError, match="another network than resnet14: kernel of stage1_block2"):
        build_model(config)


def test_another_network_with_the_same_weights_is_named(tmp_path, capfd):
    airbench = {"model": "airbench94", "width": 4}
    make_run(tmp_path, **airbench, activation="silu")
    config = SMALL.replace(**airbench, initial_weights=str(tmp_path))
    build_model(config.replace(activation="silu"))
    assert "computes something else" not in capfd.readouterr().err
    build_model(config)
    assert "for the same network give --activation=silu" in capfd.readouterr().err


def test_weights_of_a_deeper_network_are_an_error():
    """All layers of the network are there, with the same shapes, and others between them."""
    config = SMALL.replace(synthetic=True, num_classes=10)
    deeper = network_of(build_classifier(config.replace(model="resnet14"), CLASSES))
    network = network_of(build_classifier(config, CLASSES))
    weights = fine_tune._by_layer(fine_tune._named(deeper.variables))
    with pytest.raises(UserError, match="another network than resnet8: it has stage1_block2_conv1"):
        fine_tune._set(network, weights, pathlib.Path("runs/deeper"), with_head=True)


# --- Keras applications


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Their ResNet-50 with random weights and statistics, and its file."""
    keras.utils.set_random_seed(3)
    network = keras.applications.ResNet50(weights=None, classes=10, input_shape=(64, 64, 3))
    path = tmp_path_factory.mktemp("keras") / "theirs.h5"
    network.save(path)
    return network, str(path)


KERAS = {
    "model": "resnet50",
    "stride_on_1x1": True,
    "batch_norm_epsilon": 1.001e-5,
    "image_size": 64,
    "pixel_mean": (123.68, 116.779, 103.939),
}


# In the default run, tests/models/test_keras_applications.py compares their logits, and the next
# test the first convolution.
@pytest.mark.long
@pytest.mark.parametrize(
    "deviations", [pytest.param((1.0, 1.0, 1.0), marks=pytest.mark.long), (58.0, 57.0, 56.0)]
)
def test_features_are_those_of_keras_applications(theirs, deviations):
    """From pixels in the order red, green, blue, whatever they are divided by."""
    network, path = theirs
    config = SMALL.replace(initial_weights=path, pixel_std=deviations, **KERAS)
    model = build_model(config)
    pixels = np.random.RandomState(0).randint(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    prepared = keras.applications.resnet50.preprocess_input(pixels.astype(np.float32))
    expected = keras.Model(network.input, network.get_layer("avg_pool").output)(prepared).numpy()
    own = network_of(model)
    features = keras.Model(own.input, own.get_layer("global_pool").output)
    normalized = model.get_layer("normalize")(pixels)
    np.testing.assert_allclose(features(normalized).numpy(), expected, rtol=1e-3, atol=1e-4)


def test_first_convolution_of_keras_applications_takes_normalized_rgb(monkeypatch):
    """As with Keras' preprocessing: blue, green, red, and not divided by a standard deviation."""
    network = keras.Sequential([keras.layers.Conv2D(4, 3, input_shape=(8, 8, 3), use_bias=False)])
    pixels = np.random.RandomState(0).randint(0, 256, (2, 8, 8, 3)).astype(np.float32)
    prepared = keras.applications.resnet50.preprocess_input(pixels.copy())
    expected = network(prepared).numpy()
    # The weights that it has count as those of the file.
    monkeypatch.setattr(fine_tune, "load_keras_applications_weights", lambda *_, **__: None)
    config = SMALL.replace(**KERAS, pixel_std=(58.0, 57.0, 56.0))
    fine_tune._set_from_keras(network, config, pathlib.Path("weights.h5"))
    normalized = (pixels - config.pixel_mean) / config.pixel_std
    np.testing.assert_allclose(network(normalized), expected, rtol=1e-3, atol=1e-3)


def test_keras_applications_need_their_pixel_mean():
    config = SMALL.replace(**{**KERAS, "pixel_mean": (0.0, 0.0, 0.0)})
    with pytest.raises(UserError, match=r"--pixel_mean=123\.68,116\.779,103\.939"):
        fine_tune._set_from_keras(keras.Sequential(), config, pathlib.Path("weights.h5"))
