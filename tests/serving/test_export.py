"""The SavedModel answers what evaluation answers."""

import functools
import io
import json
import pathlib
import struct
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_config import SMALL
from small_network import small_network

from imagenet_fast import UserError, build_model, commands, export, make_dataset, models
from imagenet_fast.data.headers import NO_IMAGE
from imagenet_fast.data.images import normalize_encoding
from imagenet_fast.serving import export as exporting
from imagenet_fast.serving.module import serving_module
from imagenet_fast.serving.predict import predict
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir
from imagenet_fast.training.step.classifier import Classifier


@pytest.fixture(scope="module")
def exported(config, trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported") / "deep" / "model"
    # More than there are classes: all of them.
    assert export(config, directory, top_k=1000) == str(directory)
    return str(directory)


load = functools.cache(tf.saved_model.load)


def serve(directory, encoded):
    """Returns classes, labels and probabilities for encoded images."""
    loaded = load(directory)
    answers = loaded.signatures["serving_default"](images=tf.constant(encoded))
    return tuple(answers[name].numpy() for name in ("classes", "labels", "probabilities"))


def by_class(classes, probabilities):
    """Sorts probabilities of all classes by the class."""
    return np.take_along_axis(probabilities, np.argsort(classes, axis=1), axis=1)


def test_served_probabilities_are_those_of_evaluation(
    exported, validation, evaluated, evaluated_in_bfloat16
):
    encoded, _ = validation
    assert len(encoded) == 359
    classes, names, probabilities = serve(exported, encoded)
    assert classes.shape == names.shape == probabilities.shape == (359, 10)
    assert (classes.dtype, probabilities.dtype) == (np.int32, np.float32)
    assert (np.diff(probabilities) <= 0).all()
    assert (names == classes.astype("S")).all()  # digits are called what they are
    served = by_class(classes, probabilities)
    np.testing.assert_allclose(served, evaluated, rtol=0, atol=1e-5)
    # It is float32 inside: rounding to bfloat16 is seen.
    assert 1e-4 < np.abs(served - evaluated_in_bfloat16).max() < 0.3
    assert evaluated.std(axis=0).max() > 0.02  # it depends on the images


@pytest.mark.long
def test_batch_norm_groups_do_not_matter(config, trained, tmp_path):
    """As several replicas may have trained it; one that has the batch alone could not."""
    odd = config.replace(batch_norm_batch_size=24, model_dir=str(tmp_path / "run"))
    claim_model_dir(odd, trained.labels)
    Checkpoints(trained, odd).save(1, {})
    assert export(odd, tmp_path / "exported")


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
        fresh=True,
    )
    probabilities = np.array(json.loads(finished.stdout))
    np.testing.assert_allclose(probabilities, serve(exported, encoded)[2], rtol=0, atol=1e-5)


def test_images_of_any_size_and_kind(exported, validation):
    jpeg = validation[0][0]
    grey = tf.io.decode_jpeg(jpeg, channels=1)
    pngs = [tf.io.encode_png(grey).numpy(), tf.io.encode_png(tf.repeat(grey, 3, -1)).numpy()]
    assert tf.io.decode_jpeg(jpeg).shape[-1] == grey.shape[-1] == 1
    # `prepare` has made JPEGs of them.
    _, _, probabilities = serve(exported, [normalize_encoding(pngs[0]).data, *pngs])
    np.testing.assert_allclose(probabilities[1:], probabilities[[0, 0]], rtol=0, atol=1e-6)
    large = tf.image.resize(grey, [301, 212])
    _, _, probabilities = serve(exported, [tf.io.encode_jpeg(tf.cast(large, tf.uint8)).numpy()])
    assert probabilities.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.long
def test_model_and_checkpoint_export_the_same(trained, exported, validation, tmp_path):
    directory = export(trained, str(tmp_path / "model"), top_k=3)
    assert directory == str(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    found = serve(directory, validation[0][:50])
    for part, expected in zip(found, serve(exported, validation[0][:50])):
        assert part.shape == (50, 3)
        np.testing.assert_array_equal(part, expected[:, :3])


def test_signatures(exported):
    signatures = load(exported).signatures
    assert set(signatures) == {"serving_default", "features", "pixels"}
    for name in ("serving_default", "features"):
        (spec,) = signatures[name].structured_input_signature[1].values()
        assert (spec.name, spec.dtype, spec.shape.as_list()) == ("images", tf.string, [None])
    (spec,) = signatures["pixels"].structured_input_signature[1].values()
    assert (spec.name, spec.dtype, spec.shape.as_list()) == ("pixels", tf.uint8, [None, 16, 16, 3])
    assert signatures["features"].structured_outputs["features"].shape.as_list() == [None, 64]


def test_features_are_the_last_layers_inputs(exported, twin, validation, evaluated):
    """So that its weights make the logits of them."""
    loaded = load(exported)
    answers = loaded.signatures["features"](images=tf.constant(validation[0]))
    assert answers["features"].dtype == tf.float32
    assert set(answers["error"].numpy()) == {b""}
    kernel, bias = twin.layers[-1].layers[-1].weights
    probabilities = tf.nn.softmax(answers["features"] @ kernel + bias)
    np.testing.assert_allclose(probabilities, evaluated, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "channels"),
    [pytest.param("resnet18", 512, marks=pytest.mark.long), ("alexnet_bn", 4096)],
)
def test_features_of_other_networks(name, channels):
    network = models.build(name, 3, (64, 64, 3))
    features = models.features(network)
    assert tuple(features.shape) == (None, channels)
    assert network.layers[-1].input is features


def test_unreadable_images(exported, validation):
    """Each is told of by itself, and the others of its batch are answered."""
    good = validation[0][:4]
    batch = [good[0], b"", good[1], b"no image", good[2][:200], good[2], good[3]]
    bad = np.array([False, True, False, True, True, False, False])
    loaded = load(exported)
    expected = loaded.signatures["serving_default"](images=tf.constant(good))
    answers = loaded.signatures["serving_default"](images=tf.constant(batch))
    for name in ("classes", "labels"):
        np.testing.assert_array_equal(answers[name].numpy()[~bad], expected[name])
    np.testing.assert_allclose(
        answers["probabilities"].numpy()[~bad], expected["probabilities"], rtol=0, atol=1e-6
    )
    assert answers["error"].numpy().tolist() == [NO_IMAGE.encode() if b else b"" for b in bad]
    assert (answers["classes"].numpy()[bad] == -1).all()
    assert (answers["labels"].numpy()[bad] == b"").all()
    assert (answers["probabilities"].numpy()[bad] == 0).all()
    answers = loaded.signatures["features"](images=tf.constant(batch))
    features = answers["features"].numpy()
    assert (features[bad] == 0).all()
    assert features[~bad].any(axis=1).all()
    assert answers["error"].numpy().tolist() == [NO_IMAGE.encode() if b else b"" for b in bad]


def test_a_batch_of_unreadable_images(exported):
    classify = load(exported).signatures["serving_default"]
    assert (classify(images=tf.constant([b"", b"x"]))["classes"].numpy() == -1).all()


def encode(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def exported_for_small_images(config, trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("small") / "model"
    arguments = [f"--model_dir={config.model_dir}", f"--saved_model={directory}"]
    assert commands.run(["export", *arguments, "--max_pixels=1024"]) == 0
    return str(directory)


@pytest.mark.long
def test_images_above_the_limit(exported_for_small_images, validation):
    """By their headers: behind these, there is no image that could be decoded."""
    good = validation[0][:2]
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 6, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + header + bytes(20)
    red = Image.new("RGB", (32, 32), "red")
    batch = [
        good[0],
        bomb,
        encode(red.resize((32, 33)), "PNG"),
        encode(red.resize((33, 32)), "JPEG"),
        encode(red, "PNG"),
        encode(red, "JPEG"),
        good[1],
    ]
    signatures = load(exported_for_small_images).signatures
    more = "more than the limit of 1024"
    errors = ["", "20000 x 20000", "32 x 33", "33 x 32", "", "", ""]
    errors = [(error and f"{error} pixels, {more}".encode()) or b"" for error in errors]
    for name, output in (("serving_default", "probabilities"), ("features", "features")):
        answers = signatures[name](images=tf.constant(batch))
        expected = signatures[name](images=tf.constant(good))
        assert answers["error"].numpy().tolist() == errors
        np.testing.assert_allclose(
            answers[output].numpy()[[0, -1]], expected[output], rtol=0, atol=1e-6
        )
        assert (answers[output].numpy()[1:4] == 0).all()


@pytest.mark.long
def test_predict_names_the_size_of_large_images(exported_for_small_images, tmp_path):
    Image.new("L", (30, 40)).save(tmp_path / "large.png")
    (answer,) = predict(exported_for_small_images, [str(tmp_path / "large.png")])
    assert answer["error"] == "30 x 40 pixels, more than the limit of 1024"


def test_other_formats_are_named(exported, validation):
    image = Image.new("RGB", (9, 9), "red")
    palette = image.convert("P")
    jpeg = encode(image, "JPEG")
    twelve_bits = bytearray(jpeg)
    twelve_bits[jpeg.index(b"\xff\xc0") + 4] = 12
    files = {
        "GIF": encode(palette, "GIF"),
        "BMP": encode(palette, "BMP"),
        "WebP": encode(image, "WEBP", save_all=True, append_images=[image.rotate(90)]),
        "TIFF": encode(image, "TIFF"),
        "12-bit JPEG": bytes(twelve_bits),
    }
    classify = load(exported).signatures["serving_default"]
    answers = classify(images=tf.constant([*files.values(), validation[0][0]]))
    convert = "cannot be decoded: convert it to a baseline JPEG or to PNG"
    expected = [f"{name} {convert}".encode() for name in files]
    assert answers["error"].numpy().tolist() == [*expected, b""]


def test_cmyk_without_a_marker_is_decoded_as_by_prepare(exported):
    """As with the marker, by which Pillow writes what it reads as inverted either way."""
    image = Image.effect_mandelbrot((40, 40), (-2, -1, 1, 1), 20).convert("CMYK")
    jpeg = encode(image, "JPEG")
    start = jpeg.index(b"\xff\xee\x00\x0eAdobe")
    unmarked = jpeg[:start] + jpeg[start + 16 :]
    in_shard = normalize_encoding(unmarked, "png").data
    answers = serve(exported, [unmarked, jpeg, in_shard])[2]
    np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(answers[0], answers[2], rtol=0, atol=1e-2)


def test_empty_batch(exported):
    check_empty_batch(exported, classes=10, top_k=10)


@pytest.mark.long
def test_empty_batch_of_views(tmp_path):
    config = SMALL.replace(num_classes=4, test_time_augmentation="flip_and_shift")
    directory = export(build_model(config), tmp_path / "model", top_k=3)
    check_empty_batch(directory, classes=4, top_k=3)


def check_empty_batch(directory, classes, top_k):
    signatures = load(directory).signatures
    none = tf.constant([], tf.string)
    answers = signatures["serving_default"](images=none)
    assert {name: tuple(answer.shape) for name, answer in answers.items()} == {
        "classes": (0, top_k),
        "labels": (0, top_k),
        "probabilities": (0, top_k),
        "error": (0,),
    }
    answers = signatures["features"](images=none)
    assert answers["features"].shape == [0, 64] and answers["error"].shape == [0]
    answers = signatures["pixels"](pixels=tf.zeros([0, 16, 16, 3], tf.uint8))
    assert answers["probabilities"].shape == [0, classes] and answers["features"].shape == [0, 64]


def test_pixels_give_probabilities_in_the_order_of_classes(config, trained, exported, validation):
    with serving_module(trained) as module:
        pixels, _ = module.prepare(tf.constant(validation[0][:9]))
    loaded = load(exported)
    answers = loaded.signatures["pixels"](pixels=pixels)
    classes, _, probabilities = serve(exported, validation[0][:9])
    np.testing.assert_allclose(
        answers["probabilities"], by_class(classes, probabilities), rtol=0, atol=1e-6
    )
    assert answers["features"].shape == [9, 64]


def test_temperature(config, trained, exported, validation, tmp_path, capfd):
    """Probabilities become softmax(logits / temperature): powers of them, that add up to 1."""
    grey = np.array([0, 99, 200], np.uint8)[:, None, None, None]
    pixels = {"pixels": tf.constant(grey * np.ones([16, 16, 3], np.uint8))}
    plain = load(exported).signatures["pixels"](**pixels)["probabilities"].numpy().astype("float64")

    def scaled(temperature):
        powers = plain ** (1 / temperature)
        return powers / powers.sum(axis=1, keepdims=True)

    warm = export(config, tmp_path / "warm", temperature=2.5)
    found = load(warm).signatures["pixels"](**pixels)["probabilities"]
    np.testing.assert_allclose(found, scaled(2.5), rtol=1e-4, atol=1e-7)
    assert np.abs(found - plain).max() > 0.01
    for source, value in ((config, 0.0), (config, -1.0), (config, float("nan"))):
        with pytest.raises(UserError, match="must be positive"):
            export(source, tmp_path / "none", temperature=value)
    sigmoids = build_model(SMALL.replace(loss="binary_cross_entropy"))
    with pytest.raises(UserError, match="temperature is of a softmax"):
        export(sigmoids, tmp_path / "none", temperature=2.0)
    assert not (tmp_path / "none").exists()


def test_temperature_of_the_validation_images(config, trained, exported, tmp_path, monkeypatch):
    """The command exports with what ``evaluate`` finds."""
    found = {"temperature": 1.75, "examples": 9, "nll": 0.5, "nll_at_temperature": 0.25}
    asked = []

    def evaluate(config, **options):
        asked.append((config.model_dir, options))
        return found

    monkeypatch.setattr("imagenet_fast.training.evaluate.evaluate", evaluate)
    directory = str(tmp_path / "model")
    arguments = [f"--model_dir={config.model_dir}", f"--saved_model={directory}"]
    assert commands.run(["export", *arguments, "--temperature=auto"]) == 0
    assert asked == [(config.model_dir, {"checkpoint": "last", "fit_temperature": True})]
    pixels = tf.fill([1, 16, 16, 3], tf.constant(80, tf.uint8))
    answers = [
        load(d).signatures["pixels"](pixels=pixels)["probabilities"] for d in (exported, directory)
    ]
    powers = answers[0].numpy().astype("float64") ** (1 / 1.75)
    np.testing.assert_allclose(answers[1], powers / powers.sum(), rtol=1e-4)


def test_labels_have_names(validation, tmp_path):
    """Names of a data set's own, with letters that ASCII lacks."""
    names = [f"Fläche {index}" for index in range(10)]
    small = build_model(SMALL, model=small_network)
    model = Classifier(small.inputs, small.outputs[0], config=small.config, labels=names)
    classes, labels, _ = serve(export(model, tmp_path / "model"), validation[0][:20])
    assert classes.shape == (20, 5)
    for row, told in zip(classes, labels):
        assert [label.decode() for label in told] == [names[index] for index in row]


@pytest.mark.long
def test_the_crop_can_be_changed(config, trained, exported, validation, tmp_path, capfd):
    directory = tmp_path / "model"
    arguments = [f"--model_dir={config.model_dir}", f"--saved_model={directory}", "--top_k=10"]
    assert commands.run(["export", *arguments, "--eval_crop_fraction=0.5"]) == 0
    assert capfd.readouterr().out == f"{directory}\n"
    classes, _, probabilities = serve(str(directory), validation[0][:20])
    assert classes.shape == (20, 10)
    other = serve(exported, validation[0][:20])
    assert np.abs(by_class(classes, probabilities) - by_class(other[0], other[2])).max() > 0.01


@pytest.mark.long
def test_the_image_size_can_be_changed(config, twin, validation, tmp_path):
    directory = tmp_path / "model"
    arguments = [f"--model_dir={config.model_dir}", f"--saved_model={directory}", "--top_k=10"]
    assert commands.run(["export", *arguments, "--eval_image_size=24"]) == 0
    signature = load(str(directory)).signatures["pixels"].structured_input_signature[1]
    assert signature["pixels"].shape == [None, 24, 24, 3]
    larger = config.replace(image_size=24, precision="float32")
    model = build_model(larger)
    model.set_weights(twin.get_weights())
    images, _, _ = next(iter(make_dataset(larger, "validation")))
    classes, _, probabilities = serve(str(directory), validation[0][: len(images)])
    np.testing.assert_allclose(
        by_class(classes, probabilities), tf.nn.softmax(model(images, training=False)), atol=1e-5
    )


# --- What cannot be exported


def test_existing_directory(config, trained, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("model", "file"):
        with pytest.raises(UserError, match=f"{tmp_path}/{name} already exists; remove it, or"):
            export(config, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_nothing_is_written_if_another_format_cannot_be(
    config, trained, tmp_path, monkeypatch, capsys
):
    saved, onnx = tmp_path / "saved", tmp_path / "model.onnx"
    arguments = ["export", f"--model_dir={config.model_dir}", f"--saved_model={saved}"]
    onnx.touch()
    assert commands.run([*arguments, f"--onnx={onnx}"]) == 2
    assert f"{onnx} already exists; remove it, or choose another --onnx" in capsys.readouterr().err
    onnx.unlink()
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    assert commands.run([*arguments, f"--onnx={onnx}"]) == 2
    assert "this export needs tf2onnx" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_weights_are_not_exported_as_the_run_s(config, trained, tmp_path):
    with pytest.raises(UserError, match="antialias is false there, true here"):
        export(config.replace(antialias=True), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_written(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file/model: "):
        export(trained, tmp_path / "file" / "model")


@pytest.mark.long
def test_other_folders_are_kept_and_no_temporary_one(trained, tmp_path, monkeypatch):
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "precious").write_text("photographs")

    def full(module, directory, signatures):
        pathlib.Path(directory, "half").write_text("of a model")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exporting.tf.saved_model, "save", full)
        with pytest.raises(UserError, match=r"cannot write .*/model: .*No space left"):
            export(trained, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.tmp"]
    export(trained, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.tmp"]
    assert (tmp_path / "model.tmp" / "precious").read_text() == "photographs"
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


def test_users_model(tmp_path):
    inputs = keras.Input((4,))
    model = Classifier(inputs, keras.layers.Dense(3)(inputs))
    with pytest.raises(UserError, match="only a model from build_model can be exported"):
        export(model, tmp_path / "model")


class Doubled(keras.Model):
    """A functional model with a call of its own."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def test_of_a_network_with_a_call_of_its_own():
    def make(*sizes):
        network = small_network(*sizes)
        return Doubled(network.inputs[0], network.outputs[0])

    model = build_model(SMALL, model=make)
    pixels = np.random.default_rng(0).integers(0, 255, (4, 16, 16, 3), np.uint8)
    with serving_module(model) as module:
        found = module.classify_pixels(pixels)
    assert set(found) == {"probabilities"}
    expected = model.predict(pixels, verbose=0)
    np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=1e-6)
