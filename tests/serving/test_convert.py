"""ONNX and TFLite files answer what evaluation answers."""

import io
import json
import pathlib
import sys
import zipfile

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from small_config import SMALL

from imagenet_fast import UserError, build_model, commands
from imagenet_fast.models import alexnet
from imagenet_fast.serving.convert import export_onnx, export_tflite
from imagenet_fast.serving.prepare import prepare_image
from imagenet_fast.training.checkpoints.model_dir import read_preparation

EXPORT = {"onnx": export_onnx, "tflite": export_tflite}
kinds = pytest.mark.parametrize("kind", EXPORT)


def run_onnx(path, pixels):
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"pixels": pixels})))


def run_tflite(path, pixels):
    return Interpreter(path).get_signature_runner()(pixels=pixels)


def describe(path):
    """The description, as a program without TensorFlow finds it."""
    if path.endswith(".onnx"):
        session = onnxruntime.InferenceSession(path)
        return json.loads(session.get_modelmeta().custom_metadata_map["imagenet_fast"])
    return json.loads(zipfile.ZipFile(path).read("imagenet_fast.json"))


RUN = {"onnx": run_onnx, "tflite": run_tflite}


@pytest.fixture(scope="session")
def files(config, trained, tmp_path_factory):
    """A file of each kind, of the last checkpoint."""
    folder = tmp_path_factory.mktemp("files") / "deep"
    return {kind: EXPORT[kind](config, folder / f"model.{kind}") for kind in EXPORT}


@pytest.fixture(scope="session")
def prepared(files, validation):
    """The validation images, prepared as the description says."""
    options = describe(files["onnx"])["preparation"]
    return np.stack([prepare_image(encoded, **options) for encoded in validation[0]])


@pytest.mark.long
@kinds
def test_predictions_are_those_of_evaluation(files, prepared, evaluated, kind):
    answers = RUN[kind](files[kind], prepared)
    assert set(answers) == {"probabilities", "features"}
    assert {answer.dtype for answer in answers.values()} == {np.dtype(np.float32)}
    assert answers["features"].shape == (359, 64)
    np.testing.assert_allclose(answers["probabilities"], evaluated, rtol=0, atol=1e-5)
    top5 = np.argsort(-answers["probabilities"])[:, :5]
    np.testing.assert_array_equal(top5, np.argsort(-evaluated)[:, :5])


@pytest.mark.long
@kinds
def test_any_batch_size(files, prepared, kind):
    whole = RUN[kind](files[kind], prepared[:7])
    for size in (1, 3):
        part = RUN[kind](files[kind], prepared[:size])
        for name, values in part.items():
            np.testing.assert_allclose(values, whole[name][:size], rtol=0, atol=1e-5)


@pytest.mark.long
@kinds
def test_description(files, config, kind):
    assert describe(files[kind]) == {
        "labels": [str(digit) for digit in range(10)],
        "preparation": {
            "size": 16,
            "crop_fraction": 0.875,
            "crop": "square",
            "resize_method": "bilinear",
            "antialias": False,
            "as_in_shards": read_preparation(config).job,
        },
    }


@pytest.mark.long
def test_inputs_and_outputs_have_names(files):
    session = onnxruntime.InferenceSession(files["onnx"])
    (pixels,) = session.get_inputs()
    assert (pixels.name, pixels.shape) == ("pixels", ["batch", 16, 16, 3])
    assert {output.shape[0] for output in session.get_outputs()} == {"batch"}
    (signature,) = Interpreter(files["tflite"]).get_signature_list().values()
    assert signature["inputs"] == ["pixels"]
    assert sorted(signature["outputs"]) == ["features", "probabilities"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"model": "resnet18", "image_size": 32, "zero_gamma": False, "antialias": True},
            id="resnet18",
        ),
        pytest.param({"model": "alexnet_bn", "image_size": 64}, id="alexnet_bn"),
        pytest.param(
            {
                "model": "resnet8",
                "antialias": True,
                "train_sizes": (8,),
                "train_until": ("1 epochs",),
            },
            id="resnet8",
        ),
    ],
)
def test_networks(options, tmp_path, monkeypatch):
    """Untrained, but with their batch norms at work."""
    # Of AlexNet's 22 million weights 17 are between two layers, which may as well be narrower.
    dense = alexnet._dense
    narrow = lambda x, units, *args, **kwargs: dense(x, min(units, 64), *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(alexnet, "_dense", narrow)
    model = build_model(SMALL.replace(**options))
    size = options.get("image_size", 16)
    pixels = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), np.uint8)
    files = {kind: EXPORT[kind](model, tmp_path / f"model.{kind}") for kind in EXPORT}
    for file in files.values():
        assert describe(file)["preparation"]["antialias"] == options.get("antialias", False)
    found = {kind: RUN[kind](file, pixels) for kind, file in files.items()}
    expected = tf.nn.softmax(model(pixels, training=False))
    features = found["onnx"]["features"]
    for answers in found.values():
        np.testing.assert_allclose(answers["probabilities"], expected, rtol=1e-4)
        np.testing.assert_allclose(
            answers["features"], features, rtol=0, atol=1e-4 * np.abs(features).max()
        )
    assert features.std() > 0


@pytest.mark.long
def test_command(config, trained, files, tmp_path, capfd):
    paths = {kind: f"{tmp_path}/model.{kind}" for kind in EXPORT}
    flags = [f"--{kind}={path}" for kind, path in paths.items()]
    flags += [f"--model_dir={config.model_dir}", "--eval_crop_fraction=0.5"]
    assert commands.run(["export", *flags]) == 0
    assert capfd.readouterr().out.splitlines() == list(paths.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.tflite"]
    assert {describe(path)["preparation"]["crop_fraction"] for path in paths.values()} == {0.5}


# --- What cannot be exported


@kinds
def test_existing_file(kind, config, tmp_path):
    path = tmp_path / "model"
    path.write_text("mine")
    with pytest.raises(UserError, match=f"{path} already exists; remove it, or"):
        EXPORT[kind](config, path)
    assert path.read_text() == "mine"


@pytest.mark.long
@kinds
def test_file_that_cannot_be_written(kind, files, trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file/model: "):
        EXPORT[kind](trained, tmp_path / "file" / "model")


@kinds
def test_no_run(kind, config, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/none holds no training run"):
        EXPORT[kind](config.replace(model_dir=str(tmp_path / "none")), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_without_tf2onnx(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(
        UserError, match=r"this export needs tf2onnx: `pip install -e '\.\[serving\]'`"
    ):
        export_onnx(config, tmp_path / "model.onnx")


@pytest.mark.long
def test_a_tflite_file_is_also_a_zip_file(files):
    content = pathlib.Path(files["tflite"]).read_bytes()
    assert content[4:8] == b"TFL3"
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
