"""The SavedModel answers what evaluation answers."""

import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from imagenet_fast import Config, UserError, build_model, commands, export, make_dataset
from imagenet_fast.data.info import read_info
from imagenet_fast.data.records import ENCODED, LABEL, decode_example, read_records
from imagenet_fast.training.checkpoint import Checkpoints, claim_model_dir, restore_weights
from imagenet_fast.training.classifier import Classifier


@pytest.fixture(scope="module")
def config(digits, tmp_path_factory):
    return Config(
        data_dir=digits,
        model_dir=str(tmp_path_factory.mktemp("export") / "run"),
        model="resnet8",
        image_size=16,
        train_crop="none",
        flip=False,
        pixel_mean=(77.9, 77.9, 77.9),
        pixel_std=(95.9, 95.9, 95.9),
        batch_size=32,
        learning_rate_batch=32,
        warmup="0 steps",
        precision="mixed_bfloat16",
        strategy="one_device",
    )


@pytest.fixture(scope="module")
def trained(config):
    """A model trained in bfloat16, of which a checkpoint is there."""
    model = build_model(config)
    model.fit(make_dataset(config, "train"), epochs=2, verbose=0)
    claim_model_dir(config, model.labels)
    Checkpoints(model, config).save(88, {"step": 88})
    return model


@pytest.fixture(scope="module")
def twin(config, trained):
    """The same weights in float32."""
    model = build_model(config.replace(precision="float32"))
    restore_weights(model, config.model_dir)
    return model


@pytest.fixture(scope="module")
def exported(config, trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported") / "deep" / "model"
    # More than there are classes: all of them.
    assert export(config, directory, top_k=1000) == str(directory)
    return str(directory)


@pytest.fixture(scope="module")
def validation(config):
    """Encoded images and labels in the order of evaluation: a record of each shard in turn."""
    paths = read_info(config).splits["validation"].paths
    shards = [[decode_example(record) for record in read_records(path)] for path in paths]
    examples = [e for turn in itertools.zip_longest(*shards) for e in turn if e is not None]
    labels = [int(example[LABEL][0]) for example in examples]
    return [bytes(example[ENCODED][0]) for example in examples], labels


def serve(directory, encoded):
    """Returns classes, labels and probabilities for encoded images."""
    loaded = tf.saved_model.load(directory)
    answers = loaded.signatures["serving_default"](images=tf.constant(encoded))
    return tuple(answers[name].numpy() for name in ("classes", "labels", "probabilities"))


def by_class(classes, probabilities):
    """Sorts probabilities of all classes by the class."""
    return np.take_along_axis(probabilities, np.argsort(classes, axis=1), axis=1)


def evaluated(model, config, labels):
    """Probabilities of the validation images, by evaluation's own pipeline."""
    padded = -(-len(labels) // config.batch_size) * config.batch_size
    order = [label for _, some, _ in make_dataset(config, "validation") for label in some.numpy()]
    assert order == labels + [-1] * (padded - len(labels))
    steps = padded // config.batch_size
    return model.predict(make_dataset(config, "validation"), steps=steps, verbose=0)[: len(labels)]


def test_served_probabilities_are_those_of_evaluation(config, trained, twin, exported, validation):
    encoded, labels = validation
    assert len(encoded) == 359
    classes, names, probabilities = serve(exported, encoded)
    assert classes.shape == names.shape == probabilities.shape == (359, 10)
    assert (classes.dtype, probabilities.dtype) == (np.int32, np.float32)
    assert (np.diff(probabilities) <= 0).all()
    assert (names == classes.astype("S")).all()  # digits are called what they are
    served = by_class(classes, probabilities)
    expected = evaluated(twin, config.replace(precision="float32"), labels)
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-5)
    # It is float32 inside: rounding to bfloat16 is seen.
    rounded = evaluated(trained, config, labels)
    assert 1e-4 < np.abs(served - rounded).max() < 0.3
    assert expected.std(axis=0).min() > 0.01  # it has learnt something


ALONE = """
import json, pathlib, sys
import tensorflow as tf

directory, *files = sys.argv[1:]
classify = tf.saved_model.load(directory).signatures["serving_default"]
answers = classify(images=tf.constant([pathlib.Path(file).read_bytes() for file in files]))
assert not {"tf_keras", "imagenet_fast"} & set(sys.modules)
print(json.dumps(answers["probabilities"].numpy().tolist()))
"""


def test_tensorflow_alone_serves_it(exported, validation, tmp_path, run_python):
    """JPEG, and PNG of another size."""
    image = tf.io.decode_jpeg(validation[0][1], channels=3)
    png = tf.io.encode_png(tf.repeat(tf.repeat(image, 3, axis=0), 3, axis=1)).numpy()
    encoded = [validation[0][0], png]
    for index, data in enumerate(encoded):
        (tmp_path / str(index)).write_bytes(data)
    (tmp_path / "alone.py").write_text(ALONE)
    finished = run_python(
        [tmp_path / "alone.py", exported, tmp_path / "0", tmp_path / "1"],
        # With it set, TensorFlow itself imports tf_keras.
        environment={"TF_USE_LEGACY_KERAS": "0"},
    )
    probabilities = np.array(json.loads(finished.stdout))
    np.testing.assert_allclose(probabilities, serve(exported, encoded)[2], rtol=0, atol=1e-5)


def test_images_of_any_size_and_kind(exported, validation):
    jpeg = validation[0][0]
    grey = tf.io.decode_jpeg(jpeg, channels=1)
    kinds = [
        jpeg,
        tf.io.encode_png(
            tf.io.decode_jpeg(jpeg, channels=3, dct_method="INTEGER_ACCURATE")
        ).numpy(),
        tf.io.encode_png(tf.io.decode_jpeg(jpeg, dct_method="INTEGER_ACCURATE")).numpy(),
    ]
    assert tf.io.decode_jpeg(jpeg).shape[-1] == grey.shape[-1] == 1
    _, _, probabilities = serve(exported, kinds)
    np.testing.assert_allclose(probabilities[1:], probabilities[[0, 0]], rtol=0, atol=1e-6)
    large = tf.image.resize(grey, [301, 212])
    _, _, probabilities = serve(exported, [tf.io.encode_jpeg(tf.cast(large, tf.uint8)).numpy()])
    assert probabilities.sum() == pytest.approx(1, rel=1e-5)


def test_export_of_a_model_is_that_of_its_checkpoint(trained, exported, validation, tmp_path):
    directory = export(trained, str(tmp_path / "model"), top_k=3)
    assert directory == str(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    found = serve(directory, validation[0][:50])
    for part, expected in zip(found, serve(exported, validation[0][:50])):
        assert part.shape == (50, 3)
        np.testing.assert_array_equal(part, expected[:, :3])


def test_signature(exported):
    signatures = tf.saved_model.load(exported).signatures
    assert list(signatures) == ["serving_default"]
    (spec,) = signatures["serving_default"].structured_input_signature[1].values()
    assert (spec.name, spec.dtype, spec.shape.as_list()) == ("images", tf.string, [None])


def test_labels_have_names(twin, validation, tmp_path):
    """Names of a data set's own, with letters that ASCII lacks."""
    names = [f"Fläche {index}" for index in range(10)]
    model = Classifier(twin.inputs, twin.outputs[0], config=twin.config, labels=names)
    classes, labels, _ = serve(export(model, tmp_path / "model"), validation[0][:20])
    assert classes.shape == (20, 5)
    for row, told in zip(classes, labels):
        assert [label.decode() for label in told] == [names[index] for index in row]


def test_the_crop_can_be_changed(config, trained, exported, validation, tmp_path, capfd):
    directory = tmp_path / "model"
    arguments = [f"--model_dir={config.model_dir}", f"--saved_model={directory}", "--top_k=10"]
    assert commands.run(["export", *arguments, "--eval_crop_fraction=0.5"]) == 0
    assert capfd.readouterr().out == f"{directory}\n"
    classes, _, probabilities = serve(str(directory), validation[0][:20])
    assert classes.shape == (20, 10)
    other = serve(exported, validation[0][:20])
    assert np.abs(by_class(classes, probabilities) - by_class(other[0], other[2])).max() > 0.01


# --- What cannot be exported


def test_existing_directory(config, trained, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("model", "file"):
        with pytest.raises(UserError, match=f"{tmp_path}/{name} exists already; remove it, or"):
            export(config, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_directory_that_cannot_be_written(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file/model: "):
        export(trained, tmp_path / "file" / "model")


def test_what_a_kill_left_is_replaced(trained, tmp_path):
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "saved_model.pb").write_text("half")
    export(trained, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert tf.saved_model.contains_saved_model(str(tmp_path / "model"))


def test_no_run(config, tmp_path):
    with pytest.raises(UserError, match="no model: give --model_dir"):
        export(config.replace(model_dir=""), tmp_path / "model")
    with pytest.raises(UserError, match=f"{tmp_path}/none holds no training run"):
        export(config.replace(model_dir=str(tmp_path / "none")), tmp_path / "model")
    claim_model_dir(config.replace(model_dir=str(tmp_path / "run")), [*"0123456789"])
    with pytest.raises(UserError, match=f"{tmp_path}/run holds no checkpoint"):
        export(config.replace(model_dir=str(tmp_path / "run")), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_of_ones_own(tmp_path):
    inputs = keras.Input((4,))
    model = Classifier(inputs, keras.layers.Dense(3)(inputs))
    with pytest.raises(UserError, match="only a model from build_model can be exported"):
        export(model, tmp_path / "model")
