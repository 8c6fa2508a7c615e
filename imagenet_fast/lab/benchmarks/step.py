"""A benchmark of one training step against the same Keras applications network under ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError, choices_hint
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.options import InputOptions
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.lab.benchmarks.timing import Comparison, TimedCall, time_interleaved, timed
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.training.build.model import build_model
from imagenet_fast.training.build.network import precision_policy

NAMES = ("imagenet_fast", "Keras applications")
# Names: the functions' positional arguments differ between versions.
_PEERS = {"resnet50": "ResNet50", "resnet101": "ResNet101", "resnet152": "ResNet152"}


def compare_steps(config: Config, *, warmup: int, repeats: int, steps: int = 1) -> Comparison:
    """Times interleaved training steps of the model in ``config`` and of its Keras counterpart.

    Each step is a call of the function that ``fit`` calls for a step, on one device, on the same
    batch of random images. The Keras model gets normalized float32 images; this package's model
    normalizes uint8 ones itself. Ours also computes top-5 accuracy, and decays weights if
    ``config`` says so.

    Args:
      config: of the model, its precision, the image size and the batch size.
      warmup: untimed samples of each at the start.
      repeats: timed samples of each.
      steps: training steps in a sample, which ends when the device has finished.

    Raises:
      UserError: if Keras applications does not have the network.
    """
    _require_peer(config.model)
    config = config.replace(
        synthetic=True,
        num_classes=1000,
        strategy="one_device",
        # Keras applications' initialization; it affects values, not time.
        zero_gamma=False,
    )
    images, labels = _batch(config)
    theirs = keras_model(config)
    batches = tf.data.Dataset.from_tensors(
        (PixelNormalization(config.pixel_mean, config.pixel_std)(images), labels)
    )
    calls = (
        stepper(build_model(config), iter(distributed_dataset(config, "train")), steps),
        stepper(theirs, iter(batches.repeat().prefetch(tf.data.AUTOTUNE)), steps),
    )
    times = time_interleaved([timed(call) for call in calls], warmup=warmup, repeats=repeats)
    return Comparison(title(config, steps), _notes(config), NAMES, times, steps * images.shape[0])


def keras_model(config: Config) -> keras.Model:
    """Returns the network from Keras applications, compiled in the usual way.

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
        # As Keras' guide to mixed precision recommends.
        logits = keras.layers.Activation("linear", dtype="float32")(network.output)
        model = keras.Model(network.input, logits)
    model.compile(
        optimizer=keras.optimizers.SGD(config.scaled_learning_rate, momentum=config.momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def stepper(model: keras.Model, batches: Iterator, steps: int) -> Callable[[], float]:
    """Returns a function that takes ``steps`` training steps as ``fit`` does, one batch each.

    It waits until they are done and returns the last loss.
    """
    with model.distribute_strategy.scope():
        model.make_train_function()

    def take_steps() -> float:
        for _ in range(steps):
            logs = model.train_function(batches)
        return float(logs["loss"])

    return take_steps


def on_new_iterators(model: keras.Model, batches: Iterable, steps: int) -> TimedCall:
    """Returns a timed call of ``steps`` training steps, each time on a new iterator.

    A running iterator would prefetch batches during the other variants' repeats, and slow these.
    """

    def sample() -> tuple[float, float]:
        iterator = iter(batches)
        # Fills the prefetch buffer, which will be as full after the timed steps.
        stepper(model, iterator, 1)()
        return timed(stepper(model, iterator, steps))()

    return sample


def title(config: Config, steps: int) -> str:
    """Returns the title of a comparison of samples of ``steps`` training steps."""
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


def _batch(options: InputOptions) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns uint8 [batch, height, width, 3] images and int32 [batch] labels."""
    batch = next(iter(distributed_dataset(options, "train")))
    images, labels, _ = make_strategy(options).experimental_local_results(batch)[0]
    return images, labels


def _notes(config: Config) -> tuple[str, ...]:
    decay = " and weight decay" if config.weight_decay else ""
    network = (
        "The same network: stride on the 1x1 (ResNet v1), as in Keras applications."
        if config.stride_on_1x1
        else "NOT the same network: stride on the 3x3 (v1.5); Keras applications has it on the "
        "1x1 (v1), which is less work."
    )
    return (
        network,
        "Keras applications: compile(SGD with momentum, sparse cross-entropy, accuracy), "
        f"normalized float32 images. imagenet_fast: uint8 images, also top-5{decay}.",
    )
