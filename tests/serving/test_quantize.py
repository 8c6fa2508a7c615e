"""ONNX and TFLite files in int8 and float16: what is in them, and what cannot be one."""

import json
import zipfile

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from onnx import numpy_helper
from small_config import SMALL

from imagenet_fast import UserError, build_model, make_dataset
from imagenet_fast.serving.convert import export_onnx, export_tflite
from imagenet_fast.serving.quantize import calibration_images, prepared_images
from imagenet_fast.serving.runtimes import onnx as load_onnx
from imagenet_fast.serving.runtimes import tflite as load_tflite

FILES = {
    "onnx": (export_onnx, {}),
    "onnx_int8": (export_onnx, {"precision": "int8", "opset": 14}),
    "tflite": (export_tflite, {}),
    "tflite_float16": (export_tflite, {"precision": "float16"}),
    "tflite_int8": (export_tflite, {"precision": "int8"}),
}
small_files = pytest.mark.parametrize("name", [name for name in FILES if "_" in name])


@pytest.fixture(scope="module")
def files(config, trained, tmp_path_factory):
    folder, calibration = tmp_path_factory.mktemp("files"), calibration_images(config, 64)
    return {
        name: export(config, folder / name, calibration=calibration, **options)
        for name, (export, options) in FILES.items()
    }


@pytest.fixture(scope="module")
def images(config):
    pixels, labels = zip(*prepared_images(config, "validation"))
    return np.concatenate(pixels), np.concatenate(labels)


def test_prepared_images_are_those_of_evaluation(config, images):
    batches = list(make_dataset(config.replace(precision="float32"), "validation"))
    np.testing.assert_array_equal(images[0], np.concatenate([pixels for pixels, _, _ in batches]))
    np.testing.assert_array_equal(images[1], np.concatenate([labels for _, labels, _ in batches]))
    some = [pixels for pixels, _ in prepared_images(config, "validation", 40)]
    assert [len(pixels) for pixels in some] == [32, 8]
    np.testing.assert_array_equal(np.concatenate(some), images[0][:40])


@small_files
def test_predictions_are_close_to_those_of_evaluation(files, images, evaluated, name):
    load = load_onnx if name.startswith("onnx") else load_tflite
    found = load(files[name], 1)(images[0])
    assert (found.shape, found.dtype) == (evaluated.shape, np.float32)
    tolerance = 5e-3 if name == "tflite_float16" else 0.1
    np.testing.assert_allclose(found, evaluated, rtol=0, atol=tolerance)
    assert (found.argmax(1) == evaluated.argmax(1)).mean() > 0.98
    # Rounding is at work: it is not the float32 file.
    assert np.abs(found - evaluated).max() > 1e-6
    np.testing.assert_allclose(load(files[name], 1)(images[0][:1]), found[:1], atol=1e-2)


def tensors(path):
    interpreter = Interpreter(path)
    interpreter.allocate_tensors()
    return interpreter, interpreter.get_tensor_details()


def convolutions(path):
    """The kernels, [out, height, width, in], and their details, by the layer's name."""
    interpreter, details = tensors(path)
    return {
        each["name"].split("/")[-2]: (interpreter.get_tensor(each["index"]), each)
        for each in details
        if each["name"].endswith("/convolution")
    }


def test_int8_weights_of_tflite_are_rounded_to_a_scale_of_each_channel(files):
    """To the scale max|w| / 127 of each output channel, as Jacob et al. quantize weights."""
    floats, quantized = (convolutions(files[name]) for name in ("tflite", "tflite_int8"))
    assert set(floats) == set(quantized) and len(floats) == 7
    for name, (weights, details) in quantized.items():
        scales = details["quantization_parameters"]["scales"]
        largest = np.abs(floats[name][0]).max(axis=(1, 2, 3))
        used = largest > 0
        np.testing.assert_allclose(scales[used], largest[used] / 127, rtol=1e-4)
        rounded = np.rint(floats[name][0] / scales[:, None, None, None])
        assert weights.dtype == np.int8
        assert np.abs(weights[used] - rounded[used]).max() <= 1


def test_int8_weights_of_onnx_are_rounded_to_a_scale_of_each_channel(files):
    model = onnx.load(files["onnx_int8"])
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    made_by = {node.output[0]: node for node in model.graph.node}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 7
    for node in convolutions:
        dequantize = made_by[node.input[1]]
        weights, scales, zeros = (values[name] for name in dequantize.input)
        assert (weights.dtype, scales.shape, zeros.any()) == (np.int8, weights.shape[:1], False)
        # The largest of each channel is 127 scales, unless all are 0.
        largest = np.abs(weights.astype(int)).max(axis=(1, 2, 3))
        assert set(largest) <= {0, 127} and largest.any()


def test_input_and_outputs_of_tflite_in_int8(files):
    """The input is the pixels themselves, without any scale; the network computes in int8."""
    interpreter = Interpreter(files["tflite_int8"])
    (pixels,), outputs = interpreter.get_input_details(), interpreter.get_output_details()
    assert (pixels["dtype"], pixels["quantization"]) == (np.uint8, (1.0, 0))
    assert {each["dtype"] for each in outputs} == {np.float32}
    floats = [each for each in tensors(files["tflite_int8"])[1] if each["dtype"] == np.float32]
    assert len(floats) == len(outputs)


def test_float16_weights(files):
    kinds = {each["dtype"] for each in tensors(files["tflite_float16"])[1]}
    assert np.float16 in kinds and np.int8 not in kinds


def test_descriptions_stay(files):
    model = onnxruntime.InferenceSession(files["onnx_int8"])
    of_onnx = json.loads(model.get_modelmeta().custom_metadata_map["imagenet_fast"])
    assert of_onnx["preparation"]["size"] == 16
    assert model.get_inputs()[0].shape == ["batch", 16, 16, 3]
    for name in ("tflite_int8", "tflite_float16"):
        assert json.loads(zipfile.ZipFile(files[name]).read("imagenet_fast.json")) == of_onnx


def test_opset(files):
    versions = {each.domain: each.version for each in onnx.load(files["onnx_int8"]).opset_import}
    assert versions[""] == 14
    assert onnx.load(files["onnx"]).opset_import[0].version == 15


# --- What cannot be exported


@pytest.mark.parametrize(
    ("precision", "opset", "known"), [("float32", 6, "7"), ("float32", 99, "7"), ("int8", 12, "13")]
)
def test_unknown_opset(config, tmp_path, precision, opset, known):
    with pytest.raises(UserError, match=f"opset is {opset}, but must be from {known} to 1[0-9] in"):
        export_onnx(config, tmp_path / "model", opset=opset, precision=precision)


def test_opset_that_lacks_an_operation(trained, tmp_path):
    with pytest.raises(
        UserError, match=r"ONNX cannot express this network in opset 9: .*StridedSli"
    ):
        export_onnx(trained, tmp_path / "model", opset=9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", [export_onnx, export_tflite])
def test_without_calibration_images(export, trained, tmp_path):
    with pytest.raises(
        UserError, match="int8 needs images to calibrate on: give calibration_images"
    ):
        export(trained, tmp_path / "model", precision="int8")
    with pytest.raises(UserError, match="precision='int4' does not exist; did you mean 'int8'"):
        export(trained, tmp_path / "model", precision="int4")
    assert not list(tmp_path.iterdir())


def test_synthetic_images_are_not_calibrated_on():
    with pytest.raises(UserError, match="synthetic has no train images: give another --data_dir"):
        calibration_images(SMALL)


def network_with(function):
    def build(num_classes, image_shape):
        images = keras.Input(image_shape)
        x = keras.layers.GlobalAveragePooling2D()(images)
        return keras.Model(
            images, keras.layers.Dense(num_classes)(keras.layers.Lambda(function)(x))
        )

    return build_model(SMALL, model=build)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_operation_that_tflite_lacks(tmp_path, precision):
    model = network_with(lambda x: tf.math.betainc(tf.abs(x) + 1, tf.abs(x) + 1, tf.sigmoid(x)))
    with pytest.raises(
        UserError, match="TFLite lacks operations of this network: Betainc; replace"
    ):
        export_tflite(model, tmp_path / "model", precision=precision)
    assert not list(tmp_path.iterdir())


def test_exact_gelu_in_onnx(tmp_path):
    """Keras computes it by erfc, which neither ONNX nor tf2onnx has."""
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    model = network_with(lambda x: tf.nn.gelu(x) + tf.math.erfc(x / 9))
    path = export_onnx(model, tmp_path / "model")
    expected = tf.nn.softmax(model(images, training=False))
    np.testing.assert_allclose(load_onnx(path, 1)(images), expected, rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_tensors_of_layers_are_no_inputs_in_onnx(tmp_path, precision):
    """KerasHub's ViT keeps its positions so: files had a second input, which nobody could give."""
    images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    table, rows = np.random.default_rng(1).normal(size=[2, 3]).astype("f"), tf.constant([[1]])
    model = network_with(lambda x: x + tf.gather(table, rows)[0])
    path = export_onnx(model, tmp_path / "model", precision=precision, calibration=images)
    assert [value.name for value in onnx.load(path).graph.input] == ["pixels"]
    expected = tf.nn.softmax(model(images, training=False))
    atol = 0.05 if precision == "int8" else 1e-6
    np.testing.assert_allclose(load_onnx(path, 1)(images), expected, atol=atol)


def test_operation_that_onnx_lacks(tmp_path):
    model = network_with(lambda x: tf.math.betainc(tf.abs(x) + 1, tf.abs(x) + 1, tf.sigmoid(x)))
    with pytest.raises(UserError, match=r"ONNX cannot express this network in opset 15: .*Betainc"):
        export_onnx(model, tmp_path / "model")


def test_operations_that_stay_in_float_are_named(tmp_path, capfd):
    images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    model = network_with(tf.sin)
    path = export_tflite(model, tmp_path / "model", precision="int8", calibration=images)
    assert "the int8 TFLite file computes SIN in float32" in capfd.readouterr().err
    expected = tf.nn.softmax(model(images, training=False))
    np.testing.assert_allclose(load_tflite(path, 1)(images), expected, atol=0.05)
