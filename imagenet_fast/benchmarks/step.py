"""One training step against the same network from Keras applications under plain ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError, choices_hint
from imagenet_fast.benchmarks.timing import Comparison, Timed, take_turns, timed
from imagenet_fast.config import Config
from imagenet_fast.data.pipeline import make_dataset
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.training.build import build_model, precision_policy

NAMES = ("imagenet_fast", "Keras applications")
# By name: the functions are made for positional arguments that differ between versions.
_PEERS = {"resnet50": "ResNet50", "resnet101": "ResNet101", "resnet152": "ResNet152"}


def compare_steps(config: Config, *, warmup: int, repeats: int, steps: int = 1) -> Comparison:
    """Times training steps of the model that ``config`` names and of its peer, in turns.

    Each step is a call of the function that ``fit`` calls for a step, on one device, on the same
    batch of random images. The peer gets its images as float32 and normalized; this package's model
    normalizes uint8 ones itself. Ours also counts top-5 answers, and decays weights if ``config``
    says so.

    Args:
      config: of the model, its precision, the image size and the batch size.
      warmup: untimed samples of each at first.
      repeats: timed samples of each.
      steps: training steps in a sample, after which the device is waited for.

    Raises:
      UserError: if Keras applications does not have the network.
    """
    _require_peer(config.model)
    config = config.replace(
        synthetic=True,
        num_classes=1000,
        strategy="one_device",
        # As Keras applications starts; it has no part in the time, but in the values.
        zero_gamma=False,
    )
    images, labels = _batch(config)
    theirs = keras_model(config)
    batches = tf.data.Dataset.from_tensors(
        (PixelNormalization(config.pixel_mean, config.pixel_std)(images), labels)
    )
    calls = (
        stepper(build_model(config), iter(make_dataset(config, "train")), steps),
        stepper(theirs, iter(batches.repeat().prefetch(tf.data.AUTOTUNE)), steps),
    )
    times = take_turns([timed(call) for call in calls], warmup=warmup, repeats=repeats)
    return Comparison(title(config, steps), _notes(config), NAMES, times, steps * images.shape[0])


def keras_model(config: Config) -> keras.Model:
    """Returns the network from Keras applications, compiled as its users do.

    Raises:
      UserError: if Keras applications does not have the network.
    """
    _require_peer(config.model)
    shape = (config.image_size, config.image_size, 3)
    with precision_policy(config.precision):
        network = getattr(keras.applications, _PEERS[config.model])(
            weights=None,
            input_shape=shape,
            classes=config.num_classes,
            classifier_activation=None,
        )
        # Keras' guide to mixed precision asks for float32 at the end.
        logits = keras.layers.Activation("linear", dtype="float32")(network.output)
        model = keras.Model(network.input, logits)
    model.compile(
        optimizer=keras.optimizers.SGD(config.scaled_learning_rate, momentum=config.momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def stepper(model: keras.Model, batches: Iterator, steps: int) -> Callable[[], float]:
    """Returns what takes ``steps`` steps as ``fit`` does and returns when they are done.

    It takes a batch for each, and returns the loss.
    """
    with model.distribute_strategy.scope():
        train = model.make_train_function()

    def take_steps() -> float:
        for _ in range(steps):
            logs = train(batches)
        return float(logs["loss"])

    return take_steps


def on_new_iterators(model: keras.Model, batches: Iterable, steps: int) -> Timed:
    """Returns what takes ``steps`` steps as ``fit`` does, each time on an iterator of its own.

    So ``batches`` are not made ahead while others have their turn, for which these would pay.
    """

    def sample() -> tuple[float, float]:
        iterator = iter(batches)
        # Until as many batches are made ahead as will be at the end.
        stepper(model, iterator, 1)()
        return timed(stepper(model, iterator, steps))()

    return sample


def title(config: Config, steps: int) -> str:
    """Returns what so many training steps in a sample are steps of."""
    count = "training step" if steps == 1 else f"{steps} training steps"
    return (
        f"{config.model}, {count}: batch {config.batch_size}, {config.image_size} px, "
        f"{config.precision}"
    )


def _require_peer(model: str) -> None:
    if model not in _PEERS:
        raise UserError(
            f"Keras applications has no {model!r} to compare with{choices_hint(model, _PEERS)}"
        )


def _batch(config: Config) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns uint8 [batch, height, width, 3] images and int32 [batch] labels."""
    batch = next(iter(make_dataset(config, "train")))
    images, labels, _ = make_strategy(config).experimental_local_results(batch)[0]
    return images, labels


def _notes(config: Config) -> tuple[str, ...]:
    decay = " and weight decay" if config.weight_decay else ""
    network = (
        "The same network: stride on the 1x1 (ResNet v1), as Keras applications has it."
        if config.stride_on_1x1
        else "NOT the same network: stride on the 3x3 (v1.5), while Keras applications has it on "
        "the 1x1 (v1), which is less work."
    )
    return (
        network,
        "Theirs: compile(SGD with momentum, sparse cross-entropy, accuracy), float32 images that "
        f"are normalized already. Ours: uint8 images, also top-5{decay}.",
    )
