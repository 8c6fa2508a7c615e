"""Smaller files for small devices: TFLite in float16 and int8, ONNX in int8.

In int8, each output channel's weights and each tensor of activations have a scale, activations from
their range on calibration images (Jacob et al. 2018, "Quantization and Training of Neural Networks
for Efficient Integer-Arithmetic-Only Inference").
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.serving.module import ServingModule


def info_with(config: Config, split: str) -> DatasetInfo:
    """Returns what is known of the data.

    Raises:
      UserError: if it cannot be read, or has no images of the split.
    """
    info = read_info(config)
    if config.synthetic or split not in info.splits:
        raise UserError(f"{info.name} has no {split} images: give another --data_dir")
    return info


def prepared_images(
    config: Config, split: str, count: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches of a split's readable images as evaluation prepares them, and their labels.

    ``count`` of them, the first ones of all shards; 0: all.

    Raises:
      UserError: if there are none.
    """
    info = info_with(config, split)
    config = config.on_one_device().replace(
        loss_scale=0.0, strategy="one_device", data_on_device=False, model_dir=""
    )
    left = every = count or info.splits[split].examples
    for batch in distributed_dataset(config, split, evaluation=True):
        pixels, labels, weights = (part.numpy() for part in batch)
        readable = np.flatnonzero(weights > 0)[:left]
        if len(readable):
            yield pixels[readable], labels[readable]
        left -= len(readable)
        if not left:
            return
    if left == every:
        raise UserError(f"no {split} image in {config.data_dir} can be read: give other data")


def calibration_images(config: Config, count: int = 512) -> np.ndarray:
    """Returns at most so many training images, uint8 [count, size, size, 3], to calibrate int8 on.

    Raises:
      UserError: if there are none.
    """
    return np.concatenate([pixels for pixels, _ in prepared_images(config, "train", count)])


def tflite_content(
    module: ServingModule, precision: str, calibration: np.ndarray | None = None
) -> bytes:
    """Returns a TFLite model of the module's ``classify_pixels``; arguments: ``export_tflite``'s.

    Raises:
      UserError: if TFLite lacks an operation, or calibration images are missing.
    """
    function, (spec,) = module.classify_pixels, module.classify_pixels.input_signature
    if precision == "int8":
        floats = tf.TensorSpec(spec.shape, tf.float32, name=spec.name)
        function = tf.function(function.python_function, input_signature=[floats])
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if precision == "int8":
        images = _floats(calibration)
        images[0, 0, :2] = [[0], [255]]  # The input is then uint8 of scale 1: the pixels.
        kinds = tf.lite.OpsSet
        converter.target_spec.supported_ops = [kinds.TFLITE_BUILTINS_INT8, kinds.TFLITE_BUILTINS]
        converter.inference_input_type = tf.uint8
        converter.representative_dataset = lambda: ([image[np.newaxis]] for image in images)
    try:
        content = converter.convert()
    except Exception as error:  # ConverterError, which has no public name
        lacking = re.findall(r"(?:TF Select|Custom) ops: (.+)", str(error))
        if not lacking:
            raise
        reason = f"TFLite lacks operations of this network: {', '.join(lacking)}; replace the"
        raise UserError(f"{reason} layers that use them, or export a SavedModel") from None
    if precision == "int8" and (names := _float_operations(content)):
        warn_once(f"the int8 TFLite file computes {', '.join(names)} in float32")
    return content


def _float_operations(content: bytes) -> list[str]:
    """Returns the names of a TFLite model's operations whose results are float32."""
    from ai_edge_litert import schema_py_generated as schema

    names = {number: name for name, number in vars(schema.BuiltinOperator).items()}
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    found = {
        names[model.operatorCodes[operator.opcodeIndex].builtinCode]
        for graph in model.subgraphs
        for operator in graph.operators
        if graph.tensors[operator.outputs[0]].type == schema.TensorType.FLOAT32
    }
    return sorted(found - {"DEQUANTIZE"})


def quantized_onnx(content: bytes, calibration: np.ndarray | None) -> Any:
    """Returns the int8 form, an ``onnx.ModelProto``, of an ONNX model that takes ``pixels``."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    images = iter(_floats(calibration).astype(np.uint8))

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(images, None)
            return None if image is None else {"pixels": image[np.newaxis]}

    with tempfile.TemporaryDirectory(prefix="imagenet_fast_") as directory:
        source, result = (pathlib.Path(directory, name) for name in ("float32", "int8"))
        source.write_bytes(content)
        quant_pre_process(source, source, skip_symbolic_shape=True)
        # Unsigned activations have the faster kernels on x86.
        kind = {"per_channel": True, "activation_type": quantization.QuantType.QUInt8}
        quantization.quantize_static(source, result, Reader(), **kind)
        return onnx.load_model_from_string(result.read_bytes())


def _floats(calibration: np.ndarray | None) -> np.ndarray:
    if calibration is None or not len(calibration):
        raise UserError("int8 needs images to calibrate on: give calibration_images(config)")
    return calibration.astype(np.float32)
