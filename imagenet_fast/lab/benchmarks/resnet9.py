"""A benchmark of a step of Page's ResNet-9 recipe against plain Keras, and of its parts."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.cache import images_of
from imagenet_fast.data.dataset import distributed_dataset, thread_count
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.order import part_of
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.lab.benchmarks.step import on_new_iterators, stepper, title
from imagenet_fast.lab.benchmarks.timing import Comparison, Spread, time_interleaved, timed
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.models import network_of
from imagenet_fast.training.build.model import build_classifier, build_model
from imagenet_fast.training.build.network import precision_policy
from imagenet_fast.training.step.classifier import Classifier

NAMES = ("imagenet_fast", "plain Keras", "network alone", "batch alone", "update alone")
OUTSIDE = "outside the network"
_RANDOM_BATCHES, _RANDOM_CLASSES = 10, 10


def compare_resnet9(config: Config, *, warmup: int, repeats: int, steps: int = 5) -> Comparison:
    """Times interleaved training steps of a recipe and of plain Keras, and parts of a step.

    In this order, each on one device, with the same network and precision:

    * the recipe's step, as ``fit`` calls it, with the images on the device;
    * the step of a ``keras.Model`` that ``tf.data`` feeds with the same images from memory;
    * the network's forward and backward pass of a normalized batch;
    * making a batch, and nothing else;
    * the update of the weights and of their moving average, and nothing else.

    The time outside the network is the first time less the third.

    Args:
      config: of a recipe of ``resnet9``. Without ``data_dir``, images are random.
      warmup: untimed samples of each at the start.
      repeats: timed samples of each.
      steps: training steps in a sample, which ends when the device has finished. If it is a
        multiple of ``ema_every``, all samples have the same number of moving-average updates.

    Raises:
      UserError: if it is not such a recipe, or the data cannot be used.
    """
    _check(config)
    config = config.replace(strategy="one_device")
    with contextlib.ExitStack() as stack:
        if not config.data_dir:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="imagenet_fast_"))
            write_random_images(directory, _RANDOM_BATCHES * config.batch_size, config)
            config = config.replace(data_dir=directory)
        model = build_model(config)
        ours = iter(distributed_dataset(config, "train"))
        images, labels = _arrays(config)
    theirs = keras_model(config, model.labels)
    batches = keras_dataset(images, labels, len(model.labels), config)
    normalize = PixelNormalization(config.pixel_mean, config.pixel_std, dtype=tf.float32)
    first = slice(config.batch_size)
    alone = network_gradients(
        network_of(theirs), normalize(images[first]), tf.constant(labels[first]), config.xla
    )
    times = time_interleaved(
        [
            timed(stepper(model, ours, steps)),
            on_new_iterators(theirs, batches, steps),
            timed(_repeated(alone, steps)),
            timed(_repeated(_batch_maker(model, config.xla), steps)),
            timed(_repeated(_updater(model, config.xla), steps)),
        ],
        warmup=warmup,
        repeats=repeats,
    )
    whole, part = times[0].seconds, times[2].seconds
    outside = Spread.of([1 - inside / step for inside, step in zip(part, whole)])
    network = f"{config.model}, width {config.width}" if config.width else config.model
    return Comparison(
        title(network, config, steps),
        _notes(config, len(images)),
        NAMES,
        times,
        steps * config.batch_size,
        {OUTSIDE: outside},
    )


def keras_model(config: Config, labels: Sequence[str]) -> keras.Model:
    """Returns the recipe's network, from uint8 pixels to logits, compiled in Keras' usual way.

    The learning rate is Keras' default, which does not affect the time.
    """
    classifier = build_classifier(config, labels)
    with precision_policy(config.precision):
        model = keras.Model(classifier.input, classifier.output)
    model.compile(
        optimizer=keras.optimizers.SGD(momentum=config.momentum, nesterov=config.nesterov),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing
        ),
        metrics=["accuracy"],
        jit_compile=config.xla,
    )
    return model


def keras_dataset(
    images: np.ndarray, labels: np.ndarray, classes: int, options: DataOptions
) -> tf.data.Dataset:
    """Returns an infinite dataset of cropped and flipped batches, built as in Keras' guides.

    Args:
      images: uint8 [images, size, size, 3].
      labels: int [images].
      classes: their number.
      options: gives the crop padding and the batch size.

    Returns:
      uint8 [batch, size, size, 3], and float32 [batch, classes] for a loss with smoothed labels.
    """
    padding = options.crop_padding
    mode = {"zeros": "CONSTANT", "reflect": "REFLECT"}[options.crop_border]

    def change(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]], mode)
        cropped = tf.image.random_crop(padded, image.shape)
        return tf.image.random_flip_left_right(cropped), tf.one_hot(label, classes)

    return (
        tf.data.Dataset.from_tensor_slices((images, labels))
        .shuffle(len(images))
        .repeat()
        .map(change, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(options.batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def network_gradients(
    network: keras.Model, images: tf.Tensor, labels: tf.Tensor, xla: bool
) -> Callable[[], list[tf.Tensor]]:
    """Returns a function that runs only a network's forward and backward pass.

    Args:
      network: from normalized images to logits.
      images: float [batch, height, width, channels], always the same.
      labels: integer [batch].
      xla: whether XLA compiles it.

    Returns:
      A function that returns the gradients of the images' summed cross-entropy with respect to the
      trainable variables.
    """

    @tf.function(jit_compile=xla, autograph=False)
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_sum(losses)
        return tape.gradient(loss, network.trainable_variables)

    return lambda: gradients(images, labels)


def write_random_images(
    directory: str | os.PathLike[str], count: int, options: DataOptions
) -> None:
    """Prepares a data set of random images, the same ones each time, 4 of them for validation."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, images in (("train", count), ("validation", 4)):
        shape = (images, options.image_size, options.image_size, 3)
        arrays[split] = (
            random.integers(0, 256, shape, np.uint8),
            random.integers(0, _RANDOM_CLASSES, images),
        )
    names = map(str, range(_RANDOM_CLASSES))
    source = ArraySource("random", "random images", names, arrays)
    prepare(source, directory, encoding="png", progress=False)


def _check(config: Config) -> None:
    needed = {"model": "resnet9", "data_on_device": True, "train_crop": "pad"}
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"the benchmark needs a recipe with {name}={value}, like myrtle_cifar10.flags, but "
                f"this one has {name}={getattr(config, name)}"
            )


def _arrays(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training images, uint8 [images, size, size, 3], and labels, int32 [images]."""
    split, config = read_info(config).splits["train"], with_resize_kernel(config)
    part = part_of(split, config, pipelines=1, pipeline=0)
    # The model's arguments, so that its cached images are reused.
    images, labels, _ = images_of(part, "train", config, thread_count(config), None)
    return images.numpy(), labels.numpy()


def _batch_maker(model: Classifier, xla: bool) -> Callable[[], object]:
    """Returns a function that makes the model's next training batch."""
    steps, images = itertools.count(), model.training_images
    assert images is not None  # The recipe has data_on_device.
    make = tf.function(lambda step: images.batch(step, 0), jit_compile=xla, autograph=False)
    return lambda: make(tf.constant(next(steps), tf.int64))


def _updater(model: Classifier, xla: bool) -> Callable[[], object]:
    """Returns a function that updates the model as a step does, with zero gradients."""
    gradients = [tf.zeros_like(variable) for variable in model.trainable_variables]
    update = tf.function(model.update, jit_compile=xla, autograph=False)
    return lambda: model.distribute_strategy.run(update, (gradients,))


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            call()
        tf.test.experimental.sync_devices()

    return repeat


def _notes(config: Config, images: int) -> tuple[str, ...]:
    return (
        f"{images:,} images. imagenet_fast: the whole recipe, images in the device's memory. plain "
        "Keras: compile(SGD with momentum, smoothed cross-entropy, accuracy), tf.data reads images "
        "from memory, shuffles, crops and flips; no weight averaging, weight decay, schedule, "
        "per-layer learning rates, cutout or top-5 accuracy.",
        "network alone: forward and backward pass of a normalized batch. batch alone: order, "
        "crops and flips. update alone: weights and their moving average.",
    )
