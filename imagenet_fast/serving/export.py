"""From a trained model to a SavedModel that answers for encoded images."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import new_path, temporary_beside
from imagenet_fast.base.paths import Path
from imagenet_fast.config import Config
from imagenet_fast.serving.module import ServingModule, serving_module
from imagenet_fast.serving.warm_up import synthetic_jpeg, write_warm_up_requests
from imagenet_fast.training.classifier import Classifier


def export(source: Config | Classifier, directory: str | os.PathLike[str], top_k: int = 5) -> str:
    """Writes a SavedModel with evaluation's own preparation of images inside.

    Everything inside is float32, whatever the model was trained in; weights are their moving
    averages where the model keeps them. TensorFlow alone loads it. Its signatures are

    * ``serving_default``: from ``images``, a string [batch] of encoded JPEGs or PNGs of any size,
      to, best first, ``classes`` int32 [batch, k], ``labels`` string [batch, k] and
      ``probabilities`` float32 [batch, k];
    * ``features``: from the same to ``features`` float32 [batch, channels], what feeds the
      network's last dense layer: of ResNets the average over the last feature map, of AlexNet the
      outputs of its second hidden dense layer;
    * ``pixels``: from ``pixels``, uint8 [batch, image_size, image_size, 3], images that
      :func:`~imagenet_fast.serving.prepare.prepare_image` or something like it has prepared, to
      ``probabilities`` float32 [batch, classes], in the order of the classes, and ``features``.

    An image above ``max_pixels`` of the configuration is refused before it is decoded. GIF, BMP,
    WebP and others are no JPEGs or PNGs, and an error names them.

    One that is no image does not keep others of its batch from an answer. The first two signatures
    also return ``error``, string [batch], which is empty for each image with an answer and tells
    the reason where there is none; there the classes are -1, and all else is empty or 0.

    For TensorFlow Serving it holds a request for each signature, with which a server warms up.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      directory: where to write; it must not exist.
      top_k: classes in an answer; all, if there are fewer.

    Returns:
      ``directory``.

    Raises:
      UserError: if there is no checkpoint, or ``directory`` exists or cannot be written.
    """
    directory = new_path(directory, "export to another directory")
    # Written beside and renamed, so that a server never loads half a model. Only in a bucket, where
    # a folder is renamed file by file, there is a moment when it could.
    temporary = temporary_beside(directory)
    with serving_module(source, top_k) as module:
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
    tf.saved_model.save(module, str(directory), signatures=signatures)
    (spec,) = module.classify_pixels.input_signature
    images = {"images": tf.make_tensor_proto([synthetic_jpeg(spec.shape[1])])}
    # Black, of which the message holds one value.
    pixels = tf.make_tensor_proto(0, spec.dtype, [1, *spec.shape[1:]])
    requests = {"serving_default": images, "features": images, "pixels": {"pixels": pixels}}
    write_warm_up_requests(directory, requests)
