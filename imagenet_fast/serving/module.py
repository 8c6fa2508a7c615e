"""A trained network as it is served: its answers, and the way from encoded images to them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data import decode, headers
from imagenet_fast.models import network_of
from imagenet_fast.training.build import build_classifier
from imagenet_fast.training.checkpoint import restore_weights
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.model_dir import read_labels
from imagenet_fast.training.views import mean_over_views

Tensors = dict[str, tf.Tensor]

_IMAGES = (tf.TensorSpec([None], tf.string, name="images"),)


@contextlib.contextmanager
def serving_module(source: Config | Classifier, top_k: int = 5) -> Iterator[ServingModule]:
    """Gives what is exported of a trained model.

    Everything inside is float32, whatever the model was trained in.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      top_k: classes in an answer for encoded images; all, if there are fewer.

    Yields:
      The module. Until the end its weights are their moving averages, where the model keeps them.

    Raises:
      UserError: if there is no checkpoint.
    """
    config = source if isinstance(source, Config) else source.config
    if config is None:
        raise UserError("only a model from build_model can be exported: this one has no Config")
    labels = read_labels(config.model_dir) if isinstance(source, Config) else source.labels
    config = config.on_one_device()
    model = build_classifier(config, labels)
    averaged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(source, Config):
        restore_weights(model, config.model_dir)
        averaged = model.averaged_weights()
    else:
        with source.evaluated_weights():
            model.set_weights(source.get_weights())
    with averaged:
        yield ServingModule(model, config, min(top_k, len(labels)))


class ServingModule(tf.Module):
    """What is exported: the network, the labels, and evaluation's own preparation of images.

    Args:
      model: gives the network, the weights and the labels.
      config: says how images are prepared.
      top_k: classes in an answer for encoded images, no more than there are.

    Attributes:
      classify_pixels: the function that takes prepared images, ``pixels``, uint8 [batch,
        image_size, image_size, 3], and returns ``probabilities``, float32 [batch, classes], and
        ``features``, float32 [batch, channels]; the batch must have an image.
      classify_any: the same for a batch that may be empty.
    """

    def __init__(self, model: Classifier, config: Config, top_k: int) -> None:
        super().__init__()
        # Without what only training needs.
        network = network_of(model)
        network = keras.Model(network.inputs, [*network.outputs, models.features(network)])
        normalized = model.get_layer("normalize")(model.input)
        whole = keras.Model(model.inputs, network(normalized))
        # Behind a function: of a Keras model, a SavedModel would hold every layer's own function.
        self._network = lambda pixels: mean_over_views(
            lambda view: whole(view, training=False), pixels, config.test_time_augmentation
        )
        self._weights = whole.weights
        self._config = config
        self._labels = tf.constant(model.labels)
        self._top_k = top_k
        self._shape = [config.image_size, config.image_size, 3]
        spec = tf.TensorSpec([None, *self._shape], tf.uint8, name="pixels")
        self.classify_pixels = tf.function(self._classify_pixels, input_signature=[spec])
        self.classify_any = tf.function(self._classify_any, input_signature=[spec], autograph=False)

    @tf.function(input_signature=[], autograph=False)
    def labels(self) -> tf.Tensor:
        """Returns the name of each class, string [classes]: to be called on what was loaded."""
        return self._labels

    @tf.function(input_signature=_IMAGES, autograph=False)
    def classify(self, images: tf.Tensor) -> Tensors:
        """Answers for encoded images, best class first.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          ``classes`` int32 [batch, k], ``labels`` string [batch, k], ``probabilities`` float32
          [batch, k], and ``error`` string [batch], empty where there is an answer. Where there is
          none, the class is -1, the label empty and the probability 0.
        """
        pixels, error = self.prepare(images)
        best = tf.math.top_k(self.classify_any(pixels)["probabilities"], self._top_k)
        answered = error[:, tf.newaxis] == ""
        return {
            "classes": tf.where(answered, best.indices, -1),
            "labels": tf.where(answered, tf.gather(self._labels, best.indices), ""),
            "probabilities": tf.where(answered, best.values, 0.0),
            "error": error,
        }

    @tf.function(input_signature=_IMAGES, autograph=False)
    def embed(self, images: tf.Tensor) -> Tensors:
        """Features of encoded images: what feeds the last dense layer.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          ``features`` float32 [batch, channels], and ``error`` string [batch], as of
          :meth:`classify`. Where there is an error, the features are 0.
        """
        pixels, error = self.prepare(images)
        features = self.classify_any(pixels)["features"]
        return {
            "features": tf.where(error[:, tf.newaxis] == "", features, 0.0),
            "error": error,
        }

    @tf.function(input_signature=_IMAGES, autograph=False)
    def prepare(self, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Prepares encoded images as evaluation does.

        All at once; if any of them fails, again and one by one, so that good batches cost no more
        than if nothing could fail.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          uint8 [batch, image_size, image_size, 3], black where there is an error, and the errors,
          string [batch], as of :meth:`classify`.
        """
        specs = (tf.TensorSpec(self._shape, tf.uint8), tf.TensorSpec([], tf.string))

        def give_up(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            reason = headers.reason_of_failure(encoded, self._config.max_pixels)
            return tf.zeros(self._shape, tf.uint8), reason

        def decode_or_give_up(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _attempt(encoded, self._decode_one, give_up)

        pixels, error = _attempt(
            images,
            lambda batch: tf.map_fn(self._decode_one, batch, fn_output_signature=specs),
            lambda batch: tf.map_fn(decode_or_give_up, batch, fn_output_signature=specs),
        )
        return tf.ensure_shape(pixels, [None, *self._shape]), tf.ensure_shape(error, [None])

    @property
    def description(self) -> str:
        """What a program needs to use :attr:`classify_pixels`, as JSON.

        ``labels`` are the names of the classes, and ``preparation`` the arguments of
        :func:`~imagenet_fast.serving.prepare.prepare_image` after the image.
        """
        values = {
            "labels": [label.decode() for label in self._labels.numpy().tolist()],
            "preparation": {
                "size": self._config.image_size,
                "crop_fraction": self._config.eval_crop_fraction,
                "resize_method": self._config.resize_method,
                "antialias": self._config.antialias,
            },
        }
        return json.dumps(values, ensure_ascii=False)

    def _classify_pixels(self, pixels: tf.Tensor) -> Tensors:
        logits, features = self._network(pixels)
        return {"probabilities": tf.nn.softmax(logits), "features": features}

    def _classify_any(self, pixels: tf.Tensor) -> Tensors:
        # oneDNN, which TensorFlow takes on many CPUs, gives what a fused convolution makes of no
        # images a wrong shape, at which the next layer fails.
        count = tf.shape(pixels)[0]
        one_more = tf.cast(count == 0, tf.int32)
        padded = tf.pad(pixels, [[0, one_more], [0, 0], [0, 0], [0, 0]])
        answers = self._classify_pixels(tf.ensure_shape(padded, [None, *self._shape]))
        return {name: values[:count] for name, values in answers.items()}

    @tf.function(input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    def _decode_one(self, encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return decode.evaluation_image(encoded, self._config), tf.constant("")


def _attempt(value: tf.Tensor, do: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """Returns ``do(value)`` or, where that fails, ``otherwise(value)``.

    In a graph, only a data set can go on after an error.
    """
    once = tf.data.Dataset.from_tensors(value)
    made = once.map(do).ignore_errors().concatenate(once.map(otherwise))
    return made.take(1).get_single_element()
