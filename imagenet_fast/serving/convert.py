"""Export of a trained model to an ONNX or a TFLite file, which take prepared images.

Both have the input ``pixels``, uint8 [batch, image_size, image_size, 3], images from
:func:`~imagenet_fast.serving.prepare.prepare_image`, and the outputs ``probabilities``, float32
[batch, classes], and ``features``, float32 [batch, channels], as the SavedModel's signature
``pixels``. The model normalizes the pixels. It does not decode, because the formats have no JPEG
decoders, nor resize: images of different sizes cannot be in one batch, and TFLite has neither
bicubic nor antialiased resizing.
"""

from __future__ import annotations

import io
import os
import zipfile

import tensorflow as tf

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.files import new_path, write_file
from imagenet_fast.base.paths import Path
from imagenet_fast.config import Config
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.serving.module import serving_module
from imagenet_fast.training.step.classifier import Classifier

# Name of the model's description in both kinds of files.
DESCRIPTION = "imagenet_fast"
_ADVICE = "export to another file"


def export_onnx(
    source: Config | Classifier,
    path: str | os.PathLike[str],
    *,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
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

    Returns:
      ``path``.

    Raises:
      UserError: if tf2onnx is not installed, there is no checkpoint, or ``path`` exists or cannot
        be written.
    """
    check_onnx_is_installed()
    import onnx
    import tf2onnx

    path = new_path(path, _ADVICE)
    with serving_module(
        source, model=model, checkpoint=checkpoint, temperature=temperature
    ) as module:
        proto, _ = tf2onnx.convert.from_function(
            module.classify_pixels, input_signature=module.classify_pixels.input_signature
        )
        onnx.helper.set_model_props(proto, {DESCRIPTION: module.description})
    # tf2onnx gives each first dimension another name.
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return _write(path, proto.SerializeToString())


def check_onnx_is_installed() -> None:
    """Raises a UserError if :func:`export_onnx` lacks a library."""
    try:
        import onnx  # noqa: F401
        import tf2onnx  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX files need tf2onnx ({error}): {how_to_install('serving')}") from None


def export_tflite(
    source: Config | Classifier,
    path: str | os.PathLike[str],
    *,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
) -> str:
    """Writes a TFLite file with float32 weights.

    It is also a zip file, in which ``imagenet_fast.json`` has ``labels``, the classes' names, and
    ``preparation``, the arguments of ``prepare_image`` after the image.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      path: the file to write; it must not exist.
      model: the network that was given to ``train``, if it was no function of a module.
      checkpoint: of the configuration's run: ``last``, or ``best`` with ``keep_best``.
      temperature: by which logits are divided.

    Returns:
      ``path``.

    Raises:
      UserError: if there is no checkpoint, or ``path`` exists or cannot be written.
    """
    path = new_path(path, _ADVICE)
    with serving_module(
        source, model=model, checkpoint=checkpoint, temperature=temperature
    ) as module:
        function = module.classify_pixels.get_concrete_function()
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function], module)
        content = io.BytesIO(converter.convert())
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
