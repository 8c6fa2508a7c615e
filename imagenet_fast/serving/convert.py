"""Export of a trained model to an ONNX or a TFLite file, which take prepared images.

Both have the input ``pixels``, uint8 [batch, image_size, image_size, 3], images from
:func:`~imagenet_fast.serving.prepare.prepare_image`, and the outputs ``probabilities``, float32
[batch, classes], and ``features``, float32 [batch, channels], as the SavedModel's signature
``pixels``. The model normalizes the pixels. It does not decode, because the formats have no JPEG
decoders, nor resize: images of different sizes cannot be in one batch, and TFLite has neither
bicubic nor antialiased resizing.
"""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
from typing import Any

import numpy as np

from imagenet_fast.base.errors import UserError, how_to_install, require_choice
from imagenet_fast.base.files import new_path, write_file
from imagenet_fast.base.paths import Path
from imagenet_fast.config import Config
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.serving.module import serving_module
from imagenet_fast.serving.quantize import quantized_onnx, tflite_content
from imagenet_fast.training.step.classifier import Classifier

# Name of the model's description in both kinds of files.
DESCRIPTION = "imagenet_fast"
_ADVICE = "export to another file"
# ONNX Runtime guarantees to run models from this opset on; int8 scales of channels need the other.
_OLDEST_OPSET = {"float32": 7, "int8": 13}


def export_onnx(
    source: Config | Classifier,
    path: str | os.PathLike[str],
    *,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
    opset: int | None = None,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> str:
    """Writes an ONNX file.

    Its metadata has ``imagenet_fast``, JSON with ``labels``, the classes' names, and
    ``preparation``, the arguments of ``prepare_image`` after the image.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      path: the file to write; it must not exist.
      model: the network that was given to ``train``, if it was no function of a module.
      checkpoint: of the configuration's run: ``last``, or ``best`` with ``keep_best``.
      temperature: by which logits are divided.
      opset: version of ONNX' operations; None: tf2onnx' default.
      precision: ``float32``, or ``int8`` by ONNX Runtime's quantizer.
      calibration: for int8, those of :func:`~imagenet_fast.serving.quantize.calibration_images`.

    Returns:
      ``path``.

    Raises:
      UserError: if a library is not installed, there is no checkpoint, ``path`` exists or cannot be
        written, the opset lacks an operation of the network, or calibration images are missing.
    """
    require_choice("precision", precision, _OLDEST_OPSET)
    check_onnx(opset, precision)
    import onnx
    import tf2onnx

    path = new_path(path, _ADVICE)
    with serving_module(
        source, model=model, checkpoint=checkpoint, temperature=temperature
    ) as module:
        proto, _ = tf2onnx.convert.from_function(
            module.classify_pixels,
            input_signature=module.classify_pixels.input_signature,
            opset=opset,
            custom_op_handlers={"Erfc": (_erfc, [])},
        )
        # tf2onnx also lists tensors of layers, such as a ViT's positions, which are constants here.
        for value in [own for own in proto.graph.input if own.name != "pixels"]:
            proto.graph.input.remove(value)
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            raise UserError(
                f"ONNX cannot express this network in opset {proto.opset_import[0].version}: "
                f"{str(error).splitlines()[0]}; try another opset, or export a SavedModel"
            ) from None
        if precision == "int8":
            proto = quantized_onnx(proto.SerializeToString(), calibration)
        onnx.helper.set_model_props(proto, {DESCRIPTION: module.description})
    # tf2onnx gives each first dimension another name.
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return _write(path, proto.SerializeToString())


def _erfc(graph: Any, node: Any, name: str, _: Any) -> None:
    """Writes 1 - erf(x), of exact GELUs, for tf2onnx, which lacks Erfc."""
    kinds = {"shapes": node.output_shapes, "dtypes": node.output_dtypes}
    inputs, outputs = list(node.input), list(node.output)
    graph.remove_node(name)
    one = graph.make_const(f"{name}/one", np.array(1, np.float32)).output[0]
    erf = graph.make_node("Erf", inputs, **kinds).output[0]
    graph.make_node("Sub", [one, erf], name=name, outputs=outputs, **kinds)


def check_installed(*modules: str) -> None:
    """Raises a UserError if one of the modules of exports is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"this export needs {name}: {how_to_install('serving')}")


def check_onnx(opset: int | None = None, precision: str = "float32") -> None:
    """Raises a UserError if :func:`export_onnx` lacks a library, or does not know the opset."""
    check_installed("onnx", "tf2onnx", *(["onnxruntime"] if precision == "int8" else []))
    import onnx
    import tf2onnx

    oldest = _OLDEST_OPSET[precision]
    newest = min(max(tf2onnx.constants.OPSET_TO_IR_VERSION), onnx.defs.onnx_opset_version())
    if opset is not None and not oldest <= opset <= newest:
        raise UserError(
            f"opset is {opset}, but must be from {oldest} to {newest} in {precision}, with tf2onnx "
            f"{tf2onnx.__version__} and onnx {onnx.__version__}"
        )


def export_tflite(
    source: Config | Classifier,
    path: str | os.PathLike[str],
    *,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> str:
    """Writes a TFLite file.

    It is also a zip file, in which ``imagenet_fast.json`` has what an ONNX file has as metadata.
    Arguments are those of :func:`export_onnx`. ``precision`` may also be ``float16``, of weights;
    with ``int8``, what TFLite cannot compute in it is in float32, and outputs are.

    Returns:
      ``path``.

    Raises:
      UserError: if there is no checkpoint, ``path`` exists or cannot be written, TFLite lacks an
        operation of the network, calibration images are missing, or ai-edge-litert is.
    """
    require_choice("precision", precision, ("float32", "float16", "int8"))
    if precision == "int8":
        check_installed("ai_edge_litert")
    path = new_path(path, _ADVICE)
    with serving_module(
        source, model=model, checkpoint=checkpoint, temperature=temperature
    ) as module:
        content = io.BytesIO(tflite_content(module, precision, calibration))
        # Interpreters ignore what follows the model.
        with zipfile.ZipFile(content, "a") as archive:
            archive.writestr(f"{DESCRIPTION}.json", module.description)
    return _write(path, content.getvalue())


def _write(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return str(path)
