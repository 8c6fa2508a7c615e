"""Export of a trained model to a SavedModel that classifies encoded images."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import new_path, temporary_beside
from imagenet_fast.base.paths import Path
from imagenet_fast.config import Config
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.serving.module import ServingModule, serving_module
from imagenet_fast.serving.warm_up import synthetic_jpeg, write_warm_up_requests
from imagenet_fast.training.step.classifier import Classifier


def export(
    source: Config | Classifier,
    directory: str | os.PathLike[str],
    top_k: int = 5,
    *,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
) -> str:
    """Writes a SavedModel that prepares images as evaluation does.

    It computes in float32, whatever the training precision, with the moving averages of the weights
    if the model keeps them. TensorFlow alone loads it. Its signatures are

    * ``serving_default``: from ``images``, a string [batch] of encoded JPEGs or PNGs of any size,
      to ``classes`` int32 [batch, k], ``labels`` string [batch, k] and ``probabilities`` float32
      [batch, k], best first; with k the number of classes and ``thresholds`` float32 [batch, k]
      if the run's images have several labels: those from their threshold on are predicted;
    * ``features``: from the same to ``features`` float32 [batch, channels], the input of the
      network's last dense layer: of ResNets the average over the last feature map, of AlexNet the
      outputs of its second hidden dense layer; missing if a network of yours ends otherwise;
    * ``pixels``: from ``pixels``, uint8 [batch, image_size, image_size, 3], images prepared as by
      :func:`~imagenet_fast.serving.prepare.prepare_image`, to ``probabilities`` float32
      [batch, classes], in the order of the classes, and ``features``.

    The first two signatures also return ``error``, string [batch]: empty, or the reason why an
    image has no predictions; its classes are then -1, and all else is empty or 0. Errors are
    unreadable images, images above the configuration's ``max_pixels``, which are not decoded, and
    other formats, such as GIF, BMP and WebP. Other images of the batch are not affected.

    For TensorFlow Serving it holds a warm-up request for each signature.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      directory: where to write; it must not exist.
      top_k: predicted classes per image; all, if there are fewer, or if images have several labels.
      model: the network that was given to ``train``, if it was no function of a module.
      checkpoint: of the configuration's run: ``last``, or ``best`` with ``keep_best``.
      temperature: by which logits are divided: that of :func:`~imagenet_fast.evaluate` with
        ``fit_temperature``, for example.

    Returns:
      ``directory``.

    Raises:
      UserError: if there is no checkpoint, or ``directory`` exists or cannot be written.
    """
    directory = new_path(directory, "export to another directory")
    # Written under another name and renamed, so that a server never loads half a model (except in a
    # bucket, where renaming a folder is not atomic).
    temporary = temporary_beside(directory)
    with serving_module(source, top_k, model, checkpoint, temperature) as module:
        try:
            _save(module, temporary)
            temporary.replace(directory)
        except (OSError, tf.errors.OpError) as error:
            raise UserError(f"cannot write {directory}: {error}") from error
        finally:
            with contextlib.suppress(OSError, tf.errors.OpError):
                if temporary.exists():
                    tf.io.gfile.rmtree(str(temporary))
    return str(directory)


def _save(module: ServingModule, directory: Path) -> None:
    directory.mkdir(parents=True)
    signatures = {
        "serving_default": module.classify,
        "features": module.embed,
        "pixels": module.classify_any,
    }
    (spec,) = module.classify_pixels.input_signature
    images = {"images": tf.make_tensor_proto([synthetic_jpeg(spec.shape[1])])}
    # A black image: the message holds a single value.
    pixels = tf.make_tensor_proto(0, spec.dtype, [1, *spec.shape[1:]])
    requests = {"serving_default": images, "features": images, "pixels": {"pixels": pixels}}
    if not module.has_features:
        del signatures["features"], requests["features"]
    tf.saved_model.save(module, str(directory), signatures=signatures)
    write_warm_up_requests(directory, requests)
