"""From a trained model to a SavedModel that answers for encoded images."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.config import Config
from imagenet_fast.data import decode
from imagenet_fast.errors import UserError
from imagenet_fast.training.build import build_classifier
from imagenet_fast.training.checkpoint import read_labels, restore_weights
from imagenet_fast.training.classifier import Classifier


def export(source: Config | Classifier, directory: str | os.PathLike[str], top_k: int = 5) -> str:
    """Writes a SavedModel with evaluation's own preprocessing inside.

    ``serving_default`` takes ``images``, a string [batch] of encoded JPEGs or PNGs of any size, and
    returns, best first, ``classes`` int32 [batch, k], ``labels`` string [batch, k] and
    ``probabilities`` float32 [batch, k]. Everything inside is float32, whatever the model was
    trained in; weights are their moving averages where the model keeps them. TensorFlow alone
    loads it.

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
    directory = pathlib.Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists already; remove it, or export to another directory")
    config = source if isinstance(source, Config) else source.config
    if config is None:
        raise UserError("only a model from build_model can be exported: this one has no Config")
    labels = read_labels(config.model_dir) if isinstance(source, Config) else source.labels
    model = build_classifier(config.replace(precision="float32", loss_scale=0.0), labels)
    if isinstance(source, Config):
        restore_weights(model, config.model_dir)
    else:
        source.average_batch_norm_statistics()
        with source.averaged_weights():
            model.set_weights(source.get_weights())
    module = ServingModule(model, config, min(top_k, len(labels)))
    # Written beside and renamed, so that a server never loads half a model.
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    averaged = model.averaged_weights() if isinstance(source, Config) else contextlib.nullcontext()
    try:
        with averaged:
            signatures = {"serving_default": module.classify}
            tf.saved_model.save(module, str(temporary), signatures=signatures)
        temporary.rename(directory)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"cannot write {directory}: {error}") from error
    return str(directory)


class ServingModule(tf.Module):
    """What the SavedModel holds: the network, the labels, and the way from bytes to an answer."""

    def __init__(self, model: Classifier, config: Config, top_k: int) -> None:
        super().__init__()
        # Without what only training needs.
        self._network = keras.Model(model.inputs, model.outputs)
        self._config = config
        self._labels = tf.constant(model.labels)
        self._top_k = top_k

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="images")])
    def classify(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Answers for encoded images; see :func:`export`."""
        pixels = tf.map_fn(
            lambda encoded: decode.evaluation_image(encoded, self._config),
            images,
            fn_output_signature=tf.TensorSpec(
                [self._config.image_size, self._config.image_size, 3], tf.uint8
            ),
        )
        probabilities = tf.nn.softmax(self._network(pixels, training=False))
        best = tf.math.top_k(probabilities, self._top_k)
        return {
            "classes": best.indices,
            "labels": tf.gather(self._labels, best.indices),
            "probabilities": best.values,
        }
