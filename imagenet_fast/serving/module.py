"""The module that is exported: from encoded images or pixels to predictions and features."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import NOT_TRAINING, name_of, tensorflow_variables
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.data import decode, headers
from imagenet_fast.data.info import read_info
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.serving.as_in_shard import as_in_shard
from imagenet_fast.serving.prepare import ARGUMENTS
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.model_dir import (
    check_network,
    checkpoint_of,
    read_labels,
    read_preparation,
)
from imagenet_fast.training.checkpoints.sizes import no_larger_than
from imagenet_fast.training.checkpoints.thresholds import read_thresholds, thresholds_of
from imagenet_fast.training.report.multi_label import DEFAULT_THRESHOLD
from imagenet_fast.training.run import with_model
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.losses import class_probabilities
from imagenet_fast.training.step.views import mean_over_views

Tensors = dict[str, tf.Tensor]

_IMAGES = (tf.TensorSpec([None], tf.string, name="images"),)


@contextlib.contextmanager
def serving_module(
    source: Config | Classifier,
    top_k: int = 5,
    model: CustomModel | None = None,
    checkpoint: str = "last",
    temperature: float = 1.0,
) -> Iterator[ServingModule]:
    """Makes the module that is exported of a trained model; it computes in float32.

    Args:
      source: a configuration, whose ``model_dir`` holds a checkpoint, or a model from
        ``build_model``.
      top_k: predicted classes per encoded image; all, if there are fewer.
      model: the network that was given to ``train``, if it was no function of a module.
      checkpoint: of the configuration's run: ``last`` or ``best``.
      temperature: by which logits are divided, for probabilities that are less, or more, certain.

    Yields:
      The module. Until the end it has the moving averages of the weights, if the model keeps them.

    Raises:
      UserError: if there is no checkpoint, an option of the network is not the run's, or the
        temperature is not positive, or of sigmoids.
    """
    config = with_model(source, model) if isinstance(source, Config) else source.config
    if config is None:
        raise UserError("only a model from build_model can be exported: this one has no Config")
    if not 0 < temperature < math.inf:
        raise UserError(f"temperature is {temperature}, but must be positive")
    if temperature != 1 and config.loss != "cross_entropy":
        raise UserError(
            f"temperature is of a softmax, but this run's loss is {config.loss}, which gives each "
            "class a probability on its own: remove it"
        )
    averaged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(source, Config):
        check_network(config)
        config, labels = config.on_one_device(), read_labels(config.model_dir)
        path = checkpoint_of(config.model_dir, checkpoint)
        thresholds = _thresholds(config.model_dir, path, labels)
        with no_larger_than(path):
            classifier = build_classifier(config, labels, model)
        restore_weights(classifier, config.model_dir, checkpoint)
        averaged = classifier.averaged_weights()
    else:
        config, labels, thresholds = config.on_one_device(), source.labels, None
        classifier = build_classifier(config, labels, source.custom())
        if config.loss != "cross_entropy" and read_info(config).multi_label:
            thresholds = _default_thresholds("a model of Python has no evaluation", labels)
        with source.evaluated_weights():
            classifier.set_weights(source.get_weights())
    with averaged:
        top_k = len(labels) if thresholds else min(top_k, len(labels))
        yield ServingModule(
            classifier, config, read_preparation(config), top_k, temperature, thresholds
        )


def _thresholds(directory: str, checkpoint: str, labels: Sequence[str]) -> list[float] | None:
    """Returns the thresholds of a run whose images have several labels; None: it is another run."""
    thresholds = thresholds_of(directory, checkpoint, labels)
    if thresholds is None and read_thresholds(directory):
        return _default_thresholds(f"{checkpoint} was not evaluated in training", labels)
    return thresholds


def _default_thresholds(reason: str, labels: Sequence[str]) -> list[float]:
    warn_once(f"{reason}: its thresholds are {DEFAULT_THRESHOLD}, not those with the highest F1")
    return [DEFAULT_THRESHOLD] * len(labels)


class ServingModule(tf.Module):
    """The network, the labels, and evaluation's preparation of images.

    Args:
      model: gives the network, the weights, the labels and the test-time augmentation.
      options: say how evaluation decodes, crops and resizes images.
      preparation: what ``prepare`` did to the images of training; None: unknown.
      top_k: predicted classes per encoded image, at most all.
      temperature: by which logits are divided.
      thresholds: of each class, if images have several labels; None: they have one.

    Attributes:
      classify_pixels: takes prepared images, ``pixels``, uint8 [batch, image_size, image_size, 3],
        and returns ``probabilities``, float32 [batch, classes], and, with ``has_features``,
        ``features``, float32 [batch, channels]; the batch must not be empty.
      classify_any: the same for a batch that may be empty.
      has_features: whether the network ends with a dense layer, whose inputs are the features.
    """

    def __init__(
        self,
        model: Classifier,
        options: DataOptions,
        preparation: Preparation | None,
        top_k: int,
        temperature: float = 1.0,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self._preparation = preparation
        network = network_of(model)
        head = models.head(network)
        self.has_features = head is not None
        if head is not None:
            network = keras.Model(network.inputs, [*network.outputs, head.input])
        # Of floats, from which int8 files are made.
        inputs = keras.Input(model.input.shape[1:], dtype="float32")
        normalized = model.get_layer("normalize")(inputs)
        whole = keras.Model(inputs, network(normalized, **NOT_TRAINING))
        # In a lambda: a SavedModel holds functions of every layer of a Keras model in an attribute.
        self._network = lambda pixels: mean_over_views(
            lambda view: whole(view, training=False), pixels, model.views
        )
        # By name, for those who read the SavedModel; numbers make names unique.
        self._weights = {
            f"{number}/{name_of(weight)}": variable
            for number, (weight, variable) in enumerate(
                zip(whole.weights, tensorflow_variables(whole.weights))
            )
        }
        self._loss = model.image_loss
        self._temperature = temperature
        self._options = options.for_evaluation()
        self._labels = tf.constant(model.labels)
        self._top_k = top_k
        self._thresholds = None if thresholds is None else tf.constant(thresholds, tf.float32)
        self._shape = [options.evaluation_image_size, options.evaluation_image_size, 3]
        spec = tf.TensorSpec([None, *self._shape], tf.uint8, name="pixels")
        self.classify_pixels = tf.function(self._classify_pixels, input_signature=[spec])
        self.classify_any = tf.function(self._classify_any, input_signature=[spec], autograph=False)

    @tf.function(input_signature=[], autograph=False)
    def labels(self) -> tf.Tensor:
        """Returns the name of each class, string [classes]; for users of the loaded SavedModel."""
        return self._labels

    @tf.function(input_signature=[], autograph=False)
    def preparation(self) -> tf.Tensor:
        """Returns what ``prepare`` did to the images of training, JSON; ``{}``: unknown."""
        return tf.constant(json.dumps(self._preparation.job if self._preparation else {}))

    @tf.function(input_signature=_IMAGES, autograph=False)
    def classify(self, images: tf.Tensor) -> Tensors:
        """Classifies encoded images.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          ``classes`` int32 [batch, k], ``labels`` string [batch, k] and ``probabilities`` float32
          [batch, k], best first, and ``error`` string [batch]. Where it is not empty, classes are
          -1, labels empty and probabilities 0. If images have several labels, k is the number of
          classes, and ``thresholds`` float32 [batch, k] are the probabilities from which on the
          classes are predicted.
        """
        pixels, error = self.prepare(images)
        best = tf.math.top_k(self.classify_any(pixels)["probabilities"], self._top_k)
        readable = error[:, tf.newaxis] == ""
        outputs = (
            {}
            if self._thresholds is None
            else {"thresholds": tf.gather(self._thresholds, best.indices)}
        )
        return {
            **outputs,
            "classes": tf.where(readable, best.indices, -1),
            "labels": tf.where(readable, tf.gather(self._labels, best.indices), ""),
            "probabilities": tf.where(readable, best.values, 0.0),
            "error": error,
        }

    @tf.function(input_signature=_IMAGES, autograph=False)
    def embed(self, images: tf.Tensor) -> Tensors:
        """Returns features of encoded images: the inputs of the last dense layer.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          ``features`` float32 [batch, channels], 0 where there is an error, if the network has
          them, and ``error`` string [batch], as in :meth:`classify`.
        """
        pixels, error = self.prepare(images)
        outputs = {"error": error}
        if self.has_features:
            features = self.classify_any(pixels)["features"]
            outputs["features"] = tf.where(error[:, tf.newaxis] == "", features, 0.0)
        return outputs

    @tf.function(input_signature=_IMAGES, autograph=False)
    def prepare(self, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Prepares encoded images as ``prepare`` and then evaluation do.

        Decodes all without error handling; only if that fails, again one by one. Good batches thus
        have no overhead.

        Args:
          images: string [batch]: JPEGs or PNGs of any size.

        Returns:
          uint8 [batch, image_size, image_size, 3], black where there is an error, and the errors,
          string [batch], as in :meth:`classify`.
        """
        specs = (tf.TensorSpec(self._shape, tf.uint8), tf.TensorSpec([], tf.string))

        def explain(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            reason = headers.reason_of_failure(encoded, self._options.max_pixels)
            return tf.zeros(self._shape, tf.uint8), reason

        def decode_or_explain(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _attempt(encoded, self._decode_one, explain)

        pixels, error = _attempt(
            images,
            lambda batch: tf.map_fn(self._decode_one, batch, fn_output_signature=specs),
            lambda batch: tf.map_fn(decode_or_explain, batch, fn_output_signature=specs),
        )
        return tf.ensure_shape(pixels, [None, *self._shape]), tf.ensure_shape(error, [None])

    @property
    def description(self) -> str:
        """The JSON description of :attr:`classify_pixels`.

        ``labels`` are the classes' names, ``preparation`` the arguments of
        :func:`~imagenet_fast.serving.prepare.prepare_image` after the image; if images have several
        labels, ``thresholds`` are the probabilities from which on classes are predicted.
        """
        values = {
            "labels": [label.decode() for label in self._labels.numpy().tolist()],
            "preparation": {
                **{name: getattr(self._options, own) for name, own in ARGUMENTS.items()},
                "as_in_shards": self._preparation.job if self._preparation else None,
            },
        }
        if self._thresholds is not None:
            values["thresholds"] = self._thresholds.numpy().tolist()
        return json.dumps(values, ensure_ascii=False)

    def _classify_pixels(self, pixels: tf.Tensor) -> Tensors:
        logits, *features = tf.nest.flatten(self._network(tf.cast(pixels, tf.float32)))
        if self._temperature != 1:
            logits = tf.cast(logits, tf.float32) / self._temperature
        outputs = {"probabilities": class_probabilities(logits, self._loss)}
        return {**outputs, "features": features[0]} if features else outputs

    def _classify_any(self, pixels: tf.Tensor) -> Tensors:
        # An empty batch is padded to one image: oneDNN, which TensorFlow uses on many CPUs, gives a
        # fused convolution's empty result a wrong shape, at which the next layer fails.
        count = tf.shape(pixels)[0]
        padding = tf.cast(count == 0, tf.int32)
        padded = tf.pad(pixels, [[0, padding], [0, 0], [0, 0], [0, 0]])
        outputs = self._classify_pixels(tf.ensure_shape(padded, [None, *self._shape]))
        return {name: values[:count] for name, values in outputs.items()}

    @tf.function(input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    def _decode_one(self, encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if self._preparation is not None:
            encoded = as_in_shard(encoded, self._preparation, self._options.max_pixels)
        return decode.evaluation_image(encoded, self._options), tf.constant("")


def _attempt(value: tf.Tensor, do: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """Returns ``do(value)`` or, if that fails, ``otherwise(value)``.

    In a graph, only a data set can continue after an error.
    """
    data = tf.data.Dataset.from_tensors(value)
    results = data.map(do).ignore_errors().concatenate(data.map(otherwise))
    return results.take(1).get_single_element()
